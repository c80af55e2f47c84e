import logging

import pytest
from pydantic import SecretStr

from ostinato.core.errors import BadConfig, Unauthorized
from ostinato.serve.auth import Keyring, check_bind
from ostinato.serve.config import ServeConfig

KEY, OTHER, ADMIN = "sk-0123456789abcdef", "sk-fedcba9876543210", "admin-0123456789ab"


def ring(*keys, admin=None):
    return Keyring([SecretStr(k) for k in keys], SecretStr(admin) if admin else None)


def test_a_key_names_its_tenant_and_wrong_ones_are_refused():
    keys = ring(KEY, f"acme:{OTHER}", admin=ADMIN)
    assert keys.identify({"authorization": f"Bearer {KEY}"}).tenant == "default"
    assert keys.identify({"authorization": f"bearer {OTHER}"}).tenant == "acme"
    assert keys.identify({"x-api-key": OTHER}).tenant == "acme"
    assert not keys.identify({"x-api-key": OTHER}).admin
    admin = keys.identify({"x-api-key": OTHER, "x-ostinato-key": ADMIN})
    assert (admin.tenant, admin.admin) == ("acme", True)
    for bad in (
        {},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": KEY + " x"},
        {"x-api-key": "é"},
    ):
        with pytest.raises(Unauthorized) as caught:
            keys.identify(bad)
        assert KEY not in str(caught.value)


def test_without_keys_everyone_is_let_in_but_nobody_is_admin():
    who = ring(admin=ADMIN).identify({"authorization": "Bearer anything"})
    assert (who.tenant, who.admin) == ("default", False)
    assert not ring().identify({"x-ostinato-key": ""}).admin


@pytest.mark.parametrize("weak", ["short", "a" * 40, "acme:short", "no spaces:" + KEY, ""])
def test_weak_or_malformed_keys_are_refused_without_being_shown(weak):
    with pytest.raises(BadConfig, match=r"serve.api_keys\[0\]") as caught:
        ring(weak)
    assert not weak or weak not in str(caught.value)
    with pytest.raises(BadConfig):
        ring(KEY, KEY)
    with pytest.raises(BadConfig):
        ring(KEY, admin=KEY)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9", "[::1]"])
def test_loopback_needs_no_key(host):
    check_bind(host, [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.2", "example.org", "localhost.evil.org"])
def test_everything_else_does(host):
    with pytest.raises(BadConfig, match="api_keys"):
        check_bind(host, [])
    check_bind(host, [KEY])


def test_a_config_never_shows_its_keys(caplog):
    config = ServeConfig(api_keys=(KEY,), admin_key=ADMIN)
    with caplog.at_level(logging.INFO):
        logging.getLogger("x").info("%r", config)
    assert KEY not in repr(config) + str(config) + config.model_dump_json() + caplog.text
    assert ADMIN not in repr(config)
