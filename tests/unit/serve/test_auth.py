import logging

import pytest
from pydantic import SecretStr

from ostinato.core.errors import BadConfig, Unauthorized
from ostinato.serve.auth import Keyring, UserKeys, check_bind
from ostinato.serve.config import ServeConfig
from ostinato_client import sign_user

KEY, OTHER, ADMIN = "sk-0123456789abcdef", "sk-fedcba9876543210", "admin-0123456789ab"


def ring(*keys, admin=()):
    return Keyring([SecretStr(k) for k in keys], [SecretStr(k) for k in ([admin] if isinstance(admin, str) else admin)])


def identify(keys, **headers):
    return keys.identify({name.replace("_", "-").encode(): value.encode() for name, value in headers.items()})


def test_a_key_names_its_tenant_and_wrong_ones_are_refused():
    keys = ring(KEY, f"acme:{OTHER}", admin=ADMIN)
    assert identify(keys, authorization=f"Bearer {KEY}").tenant == "default"
    assert identify(keys, authorization=f"bearer {OTHER}").tenant == "acme"
    assert identify(keys, x_api_key=OTHER).tenant == "acme"
    assert not identify(keys, x_api_key=OTHER).admin
    admin = identify(keys, x_api_key=OTHER, x_ostinato_key=ADMIN)
    assert (admin.tenant, admin.admin) == ("acme", True)
    assert keys.tenants == {"default", "acme"}
    bad = [{}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"x_api_key": KEY + " x"}, {"x_api_key": "é"}]
    for headers in bad:
        with pytest.raises(Unauthorized) as caught:
            identify(keys, **headers)
        assert KEY not in str(caught.value)


def test_several_admin_keys_hold_side_by_side():
    keys = ring(KEY, admin=[ADMIN, "another-0123456789"])
    assert identify(keys, x_ostinato_key=ADMIN).admin
    assert identify(keys, x_ostinato_key="another-0123456789").admin
    assert not identify(keys, x_api_key=KEY).admin


def test_without_keys_everyone_is_let_in_but_nobody_is_admin():
    who = identify(ring(admin=ADMIN), authorization="Bearer anything")
    assert (who.tenant, who.admin) == ("default", False)
    assert not identify(ring(), x_ostinato_key="").admin


def test_a_users_signature_fits_one_tenant_one_user_and_its_time():
    keys = UserKeys(
        [SecretStr("acme:secret-0123456789"), SecretStr("acme:newer-0123456789"), SecretStr("plain-0123456789")]
    )
    signed = sign_user("secret-0123456789", "ann é", now=1000.0, lifetime_s=60.0)
    keys.check("acme", "ann é", signed, now=1060.0)
    keys.check("acme", "ann é", sign_user("newer-0123456789", "ann é", now=1000.0), now=1000.0)
    keys.check("default", "bob", sign_user("plain-0123456789", "bob", now=1000.0), now=1000.0)
    later = "9" * 10 + signed[signed.index(".") :]
    for tenant, user, signature, now in (
        ("acme", "bob", signed, 1000.0),
        ("default", "ann é", signed, 1000.0),
        ("unknown", "ann é", signed, 1000.0),
        ("acme", "ann é", signed, 1061.0),
        ("acme", "ann é", later, 1000.0),
        ("acme", "ann é", signed[:-1] + ("0" if signed[-1] != "0" else "1"), 1000.0),
        ("acme", "ann é", signed.upper(), 1000.0),
        ("acme", "ann é", "", 1000.0),
    ):
        with pytest.raises(Unauthorized):
            keys.check(tenant, user, signature, now)
    with pytest.raises(BadConfig, match=r"serve.user_keys\[0\]"):
        UserKeys([SecretStr("short")])


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
