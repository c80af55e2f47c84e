"""A page whose requests are let in may read the answers: preflights, answers, streams and errors say so; to other pages nothing does."""

import pytest
from gateway_world import ADMIN, ASK, world

ALLOW = "access-control-allow-origin"
LOCAL = "http://localhost:5173"
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}
PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/completions"]
PATHS += [
    "/v1/models",
    "/v1/models/m",
    "/v1/feedback",
    "/v1/logs",
    "/v1/traces",
    "/health",
    "/s/run-7/v1/messages",
    "//v1//messages/",
]


def asking(origin=LOCAL, **more):
    return {"origin": origin, **ASKED, **more}


@pytest.mark.parametrize("path", PATHS)
async def test_a_local_page_may_ask_before_each_route(path):
    async with world() as w:
        reply = await w.http.request("OPTIONS", f"http://127.0.0.1{path}", headers=asking())
        assert (reply.status_code, reply.content) == (204, b"")
        assert reply.headers[ALLOW] == LOCAL
        assert reply.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
        assert reply.headers["access-control-allow-methods"] in ("GET", "POST")
        assert "Origin" in reply.headers["vary"]
        assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example:5173", "file://", "http://"]
)
async def test_a_page_of_another_site_is_told_nothing(origin):
    async with world() as w:
        for method, path in (("OPTIONS", PATHS[0]), ("POST", PATHS[0]), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
            reply = await w.http.request(method, path, headers=asking(origin))
            assert reply.status_code in (403, 404)
            assert not any(name.startswith("access-control") for name in reply.headers), (method, path)
        assert not w.log.rows


async def test_a_preflight_to_another_name_or_through_a_proxy_is_refused():
    async with world() as w:
        for more, status in ({"host": "evil.example"}, 421), ({"via": "1.1 proxy"}, 403):
            reply = await w.http.request("OPTIONS", PATHS[0], headers=asking(**more))
            assert (reply.status_code, ALLOW in reply.headers) == (status, False)


async def test_answers_streams_and_errors_can_be_read():
    async with world() as w:
        page = {"origin": LOCAL}
        for fields, status in ({}, 200), ({"stream": True}, 200), ({"messages": 1}, 400), ({"model": "gpt"}, 404):
            got, headers, _ = await w.chat(headers=page, **fields)
            assert (got, headers[ALLOW], headers["access-control-expose-headers"]) == (status, LOCAL, "*"), fields
        for method, path, status in (
            ("GET", "/v1/models", 200),
            ("GET", "/v1/nothing", 404),
            ("DELETE", "/v1/models", 405),
        ):
            reply = await w.http.request(method, path, headers=page)
            assert (reply.status_code, reply.headers[ALLOW]) == (status, LOCAL), path
        assert ALLOW not in (await w.chat())[1]


async def test_pages_of_named_hosts_may_read_with_and_without_keys():
    async with world(allowed_hosts=("Box.local",)) as w:
        reply = await w.http.request("OPTIONS", PATHS[0], headers=asking("https://box.local:8443"))
        assert reply.headers[ALLOW] == "https://box.local:8443"
    async with world(allowed_hosts=("*",)) as w:
        assert (await w.http.request("OPTIONS", PATHS[0], headers=asking("https://any.example"))).status_code == 204
    keys = {"api_keys": ("sk-0123456789abcdef",), "admin_key": ADMIN}
    async with world(allowed_hosts=("acme.example",), **keys) as w:
        asked = await w.http.request("OPTIONS", PATHS[0], headers=asking("https://acme.example"))
        assert (asked.status_code, asked.headers[ALLOW]) == (204, "https://acme.example")
        refused = await w.http.post(PATHS[0], json=ASK, headers={"origin": "https://acme.example"})
        assert (refused.status_code, refused.headers[ALLOW]) == (401, "https://acme.example")


async def test_with_keys_a_page_of_another_site_is_let_in_and_may_not_read():
    async with world(api_keys=("sk-0123456789abcdef",), admin_key=ADMIN) as w:
        local = await w.http.request("OPTIONS", PATHS[0], headers=asking())
        assert (local.status_code, local.headers[ALLOW]) == (204, LOCAL)
        page = {"origin": "https://acme.example", "x-api-key": "sk-0123456789abcdef"}
        for method, status in ("OPTIONS", 403), ("POST", 200):
            reply = await w.http.request(method, PATHS[0], json=ASK, headers=asking() | page)
            assert reply.status_code == status
            assert not any(name.startswith("access-control") for name in reply.headers)


async def test_options_without_a_page_and_odd_header_names_are_not_reflected():
    async with world() as w:
        assert (await w.http.request("OPTIONS", PATHS[0])).status_code == 405
        assert (await w.http.request("OPTIONS", PATHS[0], headers={"origin": LOCAL})).status_code == 405
        assert (await w.http.request("OPTIONS", "/v1/nothing", headers=asking())).status_code == 404
        odd = await w.http.request("OPTIONS", PATHS[0], headers=asking() | {"access-control-request-headers": "<b>, x"})
        assert (odd.status_code, "access-control-allow-headers" in odd.headers) == (204, False)
        private = await w.http.request(
            "OPTIONS", PATHS[0], headers=asking() | {"access-control-request-private-network": "true"}
        )
        assert private.headers["access-control-allow-private-network"] == "true"
