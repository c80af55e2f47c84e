"""A server without keys answers only to its own names, to pages of this machine, and to no proxy."""

import pytest
from gateway_world import ADMIN, world

ALLOWED = ["127.0.0.1", "127.0.0.1:8321", "localhost:8321", "LOCALHOST", "[::1]:8321", "127.9.9.9"]
REFUSED = ["", "evil.example", "evil.example:8321", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0:8321"]
REFUSED += ["192.168.1.2", "[::2]", "127.0.0.1@evil.example", "x y", "[", "//"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/v1/models/m"])
async def test_a_page_that_points_its_name_here_reads_nothing(path):
    async with world() as w:
        for host in ALLOWED:
            assert (await w.get(path, {"host": host}))[0] == 200, host
        for host in REFUSED:
            status, text = await w.get(path, {"host": host})
            assert status == 421, host
            assert "serve.allowed_hosts" in text


async def test_a_page_of_another_site_can_not_teach_the_model():
    event = {"id": "s1", "target": "x", "name": "accepted", "value": True, "source": "human"}
    async with world() as w:
        for origin in ("https://evil.example", "null", "http://localhost.evil.example:8321", "http://", "evil"):
            status, _, body = await w.post("/v1/feedback", event, headers={"origin": origin})
            assert (status, body["error"]["code"]) == (403, "cross_site"), origin
            assert (await w.chat(headers={"origin": origin}))[0] == 403
        assert not w.log.rows
        for origin in ("http://localhost:3000", "http://127.0.0.1:8321", "https://[::1]:5173"):
            assert (await w.chat(headers={"origin": origin}))[0] == 200, origin


async def test_names_can_be_allowed_and_keys_make_it_needless():
    async with world(allowed_hosts=("Box.local",)) as w:
        assert (await w.get("/v1/models", {"host": "box.LOCAL:8321", "origin": "http://box.local"}))[0] == 200
        assert (await w.get("/v1/models", {"host": "evil.example"}))[0] == 421
    async with world(allowed_hosts=("*",)) as w:
        assert (await w.get("/v1/models", {"host": "evil.example", "origin": "null"}))[0] == 200
    async with world(api_keys=("sk-0123456789abcdef",), admin_key=ADMIN) as w:
        headers = {"host": "api.acme.example", "origin": "https://acme.example", "x-api-key": "sk-0123456789abcdef"}
        assert (await w.get("/v1/models", headers))[0] == 200


async def test_many_hosts_take_no_memory():
    async with world() as w:
        for port in range(200):
            assert (await w.get("/health", {"host": f"localhost:{port}"}))[0] == 200
        endpoint = w.app._endpoints["GET", "/health"]
        assert len(endpoint.origins._known) <= 64


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "x-forwarded-host", "X-Real-IP", "Via"])
@pytest.mark.parametrize("hosts", [(), ("*",)])
async def test_nobody_is_let_in_by_a_proxy_without_a_key(name, hosts):
    through = {name: "for=10.0.0.7"}
    async with world(allowed_hosts=hosts) as w:
        for path in ("/v1/models", "/health", "/metrics"):
            status, text = await w.get(path, through)
            assert (status, "serve.api_keys" in text) == (403, True), path
        status, _, body = await w.chat(headers=through)
        assert (status, body["error"]["code"]) == (403, "forwarded")
        assert not w.log.rows
        assert (await w.get("/v1/models"))[0] == 200
    async with world(api_keys=("sk-0123456789abcdef",)) as w:
        assert (await w.chat(headers=through | {"x-api-key": "sk-0123456789abcdef"}))[0] == 200
