"""The key for Prometheus reads the metrics of all tenants, and opens nothing else."""

import pytest
from gateway_world import ADMIN, world
from pydantic import SecretStr
from tests.fakes.page_world import page_world

from ostinato.core.errors import BadConfig
from ostinato.serve.auth import Keyring

KEY, SCRAPER = "acme:0123456789abcdef", "scraper-0123456789abcdef"
HEADERS = {"authorization": f"Bearer {SCRAPER}"}
SETTINGS = {"api_keys": [KEY], "admin_key": ADMIN, "metrics_key": SCRAPER}


async def test_it_reads_what_an_operator_reads():
    async with world(**SETTINGS) as w:
        await w.chat(headers=w.key("0123456789abcdef"))
        status, page = await w.get("/metrics", HEADERS)
        assert status == 200
        assert 'tenant="acme"' in page
        assert "ostinato_engine_tokens" in page


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/feedback", "/v1/logs"]
)
async def test_it_can_post_nothing(path):
    async with world(**SETTINGS) as w:
        assert (await w.post(path, {}, headers=HEADERS))[0] == 401
        assert (await w.post(path, {}, headers={**HEADERS, "x-ostinato-slot": "live"}))[0] == 401


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_it_can_read_nothing_else(path):
    async with world(**SETTINGS) as w:
        assert (await w.get(path, HEADERS))[0] == 401


async def test_it_opens_no_page():
    async with page_world(**SETTINGS) as w:
        for path in ("/", "/turns", "/releases", "/playground", "/events?page=turns"):
            reply = await w.http.get(path, headers=HEADERS)
            assert (reply.status_code, reply.headers["location"]) == (303, "/sign-in")
        form = {"key": SCRAPER, "back": "/"}
        reply = await w.http.post("/sign-in", data=form, headers={"sec-fetch-site": "same-origin"})
        assert (reply.status_code, "set-cookie" in reply.headers) == (401, False)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ("0123456789abcdef", "also an API key"),
        (ADMIN, "equals serve.admin_key"),
        ("short", "serve.metrics_key is too weak"),
    ],
)
def test_it_is_nobody_elses_key(own, why):
    with pytest.raises(BadConfig, match=why) as told:
        Keyring([SecretStr(KEY)], [SecretStr(ADMIN)], metrics_key=SecretStr(own))
    assert own not in str(told.value).replace("too weak", "")


async def test_a_new_client_cannot_have_it(tmp_path):
    keys = Keyring([SecretStr(KEY)], [SecretStr(ADMIN)], metrics_key=SecretStr(SCRAPER))
    with pytest.raises(BadConfig, match="also an API key"):
        keys.renew([SecretStr(f"acme:{SCRAPER}")])
