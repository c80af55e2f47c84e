"""Who may see and do what on the page, and what every answer tells the browser."""

import asyncio
from dataclasses import replace

import pytest
from tests.fakes.page_world import ACME, ADMIN, BOLT, OWN_FORM, V17, V18, page_world
from tests.virtual_time import in_virtual_time

from ostinato.web.page import app

KEYS = (f"acme:{ACME}", f"bolt:{BOLT}")
PAGES = [
    "/",
    "/releases",
    f"/releases/{V17.hash}",
    "/turns",
    "/turns/chatcmpl-3f:0",
    "/learning",
    "/monitors",
    "/weights",
]
ALARM = "/monitors/coverage:acme"
SHIP, APPROVE, REFUSE = (f"/releases/{V18.hash}/{act}" for act in ("ship", "approve", "refuse"))
FORM = {"expected_live": V17.hash, "reason": "it is better", "actor": "ann"}


@pytest.mark.parametrize("path", [*PAGES, ALARM, "/playground", "/sign-in", "/turns/none", "/releases/zz"])
async def test_every_page_forbids_what_it_does_not_need(path):
    async with page_world() as w:
        reply = await w.get(path)
        csp = reply.headers["content-security-policy"]
        assert "default-src 'none'" in csp
        assert "script-src 'self'" in csp
        assert "unsafe" not in csp
        assert "frame-ancestors 'none'" in csp
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "same-origin"
        kept = path in PAGES and not path.startswith("/turns")
        assert reply.headers["cache-control"] == ("private, no-cache" if kept else "private, no-store")
        assert "style=" not in reply.text
        assert "<script>" not in reply.text
        assert "//" not in reply.text.replace("http://127.0.0.1:8321", "").replace("http://www.w3.org", "")


async def test_a_release_has_the_names_that_people_give_it():
    async with page_world() as w:
        for name in ("v17", "live", V17.hash[:8]):
            assert "<h1>v17" in (await w.get(f"/releases/{name}")).text.replace("\n", ""), name
        for name, said in (("v99", "no version v99"), ("17", "give live, v12 or"), ("v", "give live, v12 or")):
            assert said in (await w.get(f"/releases/{name}")).text


async def test_where_there_is_nothing_a_browser_gets_a_page_and_a_program_what_there_is_for_it():
    async with page_world() as w:
        page = await w.get("/realeses", accept="text/html,*/*")
        assert (page.status_code, "There is no page /realeses" in page.text) == (404, True)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "/v1/feedback" in (await w.get("/realeses")).json()["error"]["message"]
        assert (await w.get("/v1/feedback")).status_code == 405


async def test_files_are_kept_for_ever_under_the_name_of_their_bytes():
    async with page_world() as w:
        page = (await w.get("/")).text
        at = page.index("/static/")
        path = page[at : page.index('"', at)]
        reply = await w.get(path)
        assert reply.status_code == 200
        assert "immutable" in reply.headers["cache-control"]
        assert (await w.get(path.replace("/static/", "/static/0"))).status_code == 404
        assert (await w.get("/static/00000000/../../config.py")).status_code == 404


async def test_what_a_browser_has_is_not_sent_again():
    async with page_world() as w:
        page = await w.get("/releases")
        tag = page.headers["etag"]
        w.facts.run = replace(w.facts.run, at=w.facts.run.at + 5)
        again = await w.get("/releases", if_none_match=f'"x", {tag}')
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await w.get("/releases", ADMIN, if_none_match=tag)).status_code == 200
        w.facts.run = replace(w.facts.run, refs={"live": V18})
        assert (await w.get("/releases", if_none_match=tag)).status_code == 200
        assert "etag" not in (await w.get("/turns")).headers
        at = page.text.index("/static/")
        file = await w.get(page.text[at : page.text.index('"', at)])
        assert (await w.get(str(file.url), if_none_match=file.headers["etag"])).status_code == 304


async def test_another_name_for_this_machine_is_not_answered():
    async with page_world() as w:
        for path in PAGES:
            reply = await w.get(path, host="evil.example")
            assert (reply.status_code, reply.json()["error"]["code"]) == (421, "wrong_host")
        refused = await w.post(SHIP, FORM, ADMIN, host="evil.example")
        assert refused.status_code == 421
        assert (await w.get("/", x_forwarded_for="10.0.0.7")).status_code == 403
        assert not w.acts.done


async def test_what_is_not_a_page_is_answered_as_before():
    async with page_world() as w:
        assert (await w.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        assert (await w.http.post("/health")).status_code == 405
        assert (await w.http.post("/releases", headers=OWN_FORM)).status_code == 405
        assert (await w.get("/health")).headers["content-type"] == "application/json"


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("headers", "done"),
    [
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1"}, True),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": ""}, False),
        ({"origin": "http://127.0.0.1"}, True),
        ({"origin": "http://127.0.0.1:9999"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "http://127.0.0.1.evil.example"}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("path", [SHIP, APPROVE, REFUSE, "/rollback", "/playground", "/playground/feedback"])
async def test_only_the_pages_own_forms_do_anything(path, headers, done):
    fields = {**FORM, "prompt": "hi", "turn": "t", "name": "accepted"}
    for keys in ((), KEYS):
        async with page_world(api_keys=keys) as w:
            reply = await w.http.post(path, data=fields, headers={"x-ostinato-key": ADMIN, **headers})
            assert (reply.status_code == 200) == done
            assert bool(w.acts.done) == done
            if not done:
                assert reply.status_code in (403, 421)


async def test_a_form_needs_a_reason_a_name_and_what_was_seen_to_be_live():
    async with page_world() as w:
        for missing in FORM:
            reply = await w.post(SHIP, {**FORM, missing: " "}, ADMIN)
            assert reply.status_code == 400
            assert missing in reply.text
        assert (await w.http.post(SHIP, json=FORM, headers={**OWN_FORM, "x-ostinato-key": ADMIN})).status_code == 400
        assert (await w.post(SHIP, {**FORM, "reason": "x" * 513}, ADMIN)).status_code == 400
        assert (await w.post(SHIP, {**FORM, "more": "x" * 70_000}, ADMIN)).status_code == 413
        assert (await w.post("/releases/zz/ship", FORM, ADMIN)).status_code == 400
        assert not w.acts.done


async def test_of_two_who_press_one_is_told():
    async with page_world() as w:
        assert (await w.post(SHIP, FORM, ADMIN)).status_code == 200
        assert w.acts.done == [("ship", V18.hash, "it is better", "ann")]
        w.acts.live = V18.hash
        late = await w.post("/rollback", FORM, ADMIN)
        assert late.status_code == 409
        assert "something else is live now" in late.text
        assert len(w.acts.done) == 1


async def test_what_waits_for_approval_has_two_buttons_and_each_does_its_own():
    async with page_world() as w:
        path = f"/releases/{V18.hash}"
        assert "waits for approval" not in (await w.get(path, ADMIN)).text
        w.facts.awaits = True
        page = (await w.get(path, ADMIN)).text
        assert "It has passed and waits for approval" in page
        assert f'action="{APPROVE}"' in page
        assert f'formaction="{REFUSE}"' in page
        assert "ostinato approve v18" in (await w.get(path)).text
        assert (await w.post(APPROVE, FORM, ADMIN)).status_code == 200
        assert (await w.post(REFUSE, FORM, ADMIN)).status_code == 200
        assert w.acts.done == [(act, V18.hash, "it is better", "ann") for act in ("approve", "refuse")]


# ---------------------------------------------------------------- keys


async def test_without_keys_everybody_here_reads_and_nobody_acts():
    async with page_world() as w:
        for path in PAGES:
            assert (await w.get(path)).status_code == 200
        for path in (SHIP, APPROVE, REFUSE, "/rollback", "/playground", "/playground/feedback"):
            assert (await w.post(path, FORM)).status_code == 403
        assert not w.acts.done
        assert 'action="/releases' not in (await w.get(f"/releases/{V18.hash}")).text
        assert 'action="/releases' in (await w.get(f"/releases/{V18.hash}", ADMIN)).text


async def test_with_keys_a_stranger_sees_the_form_to_sign_in_and_no_more():
    async with page_world(api_keys=KEYS) as w:
        for path in [*PAGES, "/events?page=now", "/playground"]:
            reply = await w.get(path)
            assert (reply.status_code, reply.headers["location"]) == (303, "/sign-in")
        for path in (SHIP, APPROVE, REFUSE, "/rollback"):
            assert (await w.post(path, FORM)).status_code == 401
        assert not w.acts.done
        assert (await w.get("/sign-in")).status_code == 200


async def test_a_tenant_sees_its_own_turns_and_nothing_of_the_run():
    async with page_world(api_keys=KEYS) as w:
        assert "Hello, Ann!" in (await w.get("/turns", ACME)).text
        assert (await w.get("/turns/chatcmpl-3f:0", ACME)).status_code == 200
        assert "Hello, Ann!" not in (await w.get("/turns?tenant=acme", BOLT)).text
        assert (await w.get("/turns/chatcmpl-3f:0", BOLT)).status_code == 404
        assert [query.tenant for query in w.facts.asked] == ["acme", "bolt"]
        assert (await w.get("/", ACME)).headers["location"] == "/turns"
        for path in ("/releases", "/learning", "/monitors", ALARM, "/weights", "/playground", "/events?page=now"):
            reply = await w.get(path, ACME)
            assert reply.status_code == 403
            assert "v17" not in reply.text
        for path in (SHIP, APPROVE, REFUSE, "/rollback", "/playground"):
            assert (await w.post(path, FORM, ACME)).status_code == 403
        assert not w.acts.done
        assert "Hello, Ann!" in (await w.get("/turns", ADMIN)).text


@in_virtual_time
async def test_a_tenants_page_goes_on_by_itself_with_its_own_turns_only(monkeypatch):
    monkeypatch.setattr(app, "EVERY_S", 0.01)
    async with page_world(api_keys=KEYS) as w:
        for key, seen in ((ACME, True), (BOLT, False)):
            assert (
                'hx-sse:connect="/events?page=turns&amp;tenant=acme"' in (await w.get("/turns?tenant=acme", key)).text
            )
            asyncio.get_running_loop().call_later(0.1, w.pages.close)
            said = (await w.get("/events?page=turns&tenant=acme", key)).text
            assert ("Hello, Ann!" in said) == seen
            assert "event: beat" in said
            assert "#strip" not in said
            w.pages._live._closing.clear()
        assert {query.tenant for query in w.facts.asked} == {"acme", "bolt"}


async def test_a_key_is_exchanged_for_a_cookie_that_does_not_hold_it():
    async with page_world(api_keys=KEYS) as w:
        assert (await w.post("/sign-in", {"key": "wrong-0123456789"})).status_code == 401
        reply = await w.post("/sign-in", {"key": ADMIN})
        assert reply.status_code == 303
        said = reply.headers["set-cookie"]
        assert ADMIN not in said
        for word in ("HttpOnly", "SameSite=strict", "Path=/"):
            assert word.lower() in said.lower()
        cookie = said.partition(";")[0]
        w.http.cookies.clear()
        assert (await w.get("/", cookie=cookie)).status_code == 200
        assert (await w.post(SHIP, FORM, cookie=cookie)).status_code == 200
        assert (await w.get("/v1/models", cookie=cookie)).status_code == 401
        for broken in (cookie[:-1] + ("0" if cookie[-1] != "0" else "1"), "ostinato=", cookie.replace("=", "=9", 1)):
            assert (await w.get("/", cookie=broken)).status_code == 303
        assert (await w.get("/", cookie=f'a="; {cookie}; b=[')).status_code == 200
        w.now += 12 * 3600 + 1
        assert (await w.get("/", cookie=cookie)).status_code == 303


async def test_a_cookie_outlives_a_restart_and_ends_with_its_keys():
    async with page_world(api_keys=KEYS) as w:
        cookie = (await w.post("/sign-in", {"key": ACME})).headers["set-cookie"].partition(";")[0]
    async with page_world(api_keys=KEYS) as w:
        assert (await w.get("/turns", cookie=cookie)).status_code == 200
        assert w.facts.asked[0].tenant == "acme"
    async with page_world(api_keys=KEYS[1:]) as w:
        assert (await w.get("/turns", cookie=cookie)).status_code == 303


async def test_who_signed_out_is_not_let_in_by_a_copy_of_the_cookie():
    async with page_world(api_keys=KEYS) as w:
        cookies = []
        for _ in range(2):
            cookies.append((await w.post("/sign-in", {"key": ACME})).headers["set-cookie"].partition(";")[0])
            w.now += 1
        w.http.cookies.clear()
        assert (await w.post("/sign-out", {}, cookie=cookies[0])).status_code == 303
        assert (await w.get("/turns", cookie=cookies[0])).status_code == 303
        assert (await w.get("/turns", cookie=cookies[1])).status_code == 200


async def test_behind_a_proxy_the_cookie_is_for_https_only():
    async with page_world(api_keys=KEYS, secure_cookie=True) as w:
        said = (await w.post("/sign-in", {"key": ACME})).headers["set-cookie"]
        assert said.startswith("__Host-ostinato=")
        assert "secure" in said.lower()
        w.http.cookies.clear()
        cookie = said.partition(";")[0]
        assert (await w.get("/turns", cookie=cookie)).status_code == 200
        assert "secure" in (await w.post("/sign-out", {}, cookie=cookie)).headers["set-cookie"].lower()


async def test_the_cookie_is_for_https_only_where_the_proxy_says_that_it_speaks_it():
    async with page_world(api_keys=KEYS) as w:
        behind = await w.post("/sign-in", {"key": ACME}, x_forwarded_proto="https")
        assert behind.headers["set-cookie"].startswith("__Host-ostinato=")
        assert (await w.post("/sign-in", {"key": ACME})).headers["set-cookie"].startswith("ostinato=")


async def test_cookies_of_the_same_names_hide_none_and_sign_out_ends_all():
    async with page_world(api_keys=KEYS, secure_cookie=True) as w:
        cookie = (await w.post("/sign-in", {"key": ACME})).headers["set-cookie"].partition(";")[0]
        w.now += 1
        w.http.cookies.clear()
        token = cookie.partition("=")[2]
        forged = f"{token[:-1]}{'0' if token[-1] != '0' else '1'}"
        other = (await w.post("/sign-in", {"key": ACME})).headers["set-cookie"].partition(";")[0]
        w.http.cookies.clear()
        assert (await w.get("/turns", cookie=f"ostinato={token}")).status_code == 303, "not the name for HTTPS"
        for before in (f"ostinato={token}", f"__Host-ostinato={forged}"):
            assert (await w.get("/turns", cookie=f"{before}; {cookie}")).status_code == 200
        gone = await w.post("/sign-out", {}, cookie=f"{cookie}; {other}")
        assert len(gone.headers.get_list("set-cookie")) == 2
        for each in (cookie, other):
            assert (await w.get("/turns", cookie=each)).status_code == 303


@in_virtual_time
async def test_a_form_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("ostinato.web.page.query_params.FORM_S", 0.05)

    async def begun():
        yield b"key="
        await asyncio.sleep(60)

    async with page_world(api_keys=KEYS) as w:
        headers = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"}
        reply = await w.http.post("/sign-in", content=begun(), headers=headers)
        assert reply.status_code == 408


async def test_who_goes_while_signing_in_leaves_nothing_behind(caplog):
    async with page_world(api_keys=KEYS) as w:
        body = [{"type": "http.request", "body": b"key=", "more_body": True}, {"type": "http.disconnect"}]
        sent: list = []
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/x-www-form-urlencoded")]
        headers += [(name.encode(), value.encode()) for name, value in OWN_FORM.items()]

        async def receive():
            return body.pop(0)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/sign-in", "query_string": b"", "headers": headers}
        await w.app(scope, receive, send)
        assert sent[0]["status"] == 499
    assert not caplog.records


async def test_without_keys_other_sites_open_the_first_page_and_load_none():
    ways = [("cross-site", "navigate"), ("cross-site", "no-cors"), ("same-origin", "cors"), ("none", "navigate")]
    async with page_world() as w:
        for path, expected in (("/", [200, 403, 200, 200]), ("/turns?text=secret", [403, 403, 200, 200])):
            got = [(await w.get(path, sec_fetch_site=site, sec_fetch_mode=mode)).status_code for site, mode in ways]
            assert got == expected, path
    async with page_world(api_keys=KEYS) as w:
        assert (await w.get("/turns", ACME, sec_fetch_site="cross-site", sec_fetch_mode="navigate")).status_code == 200


async def test_nobody_is_signed_in_from_another_sites_form():
    async with page_world(api_keys=KEYS) as w:
        for site in ("cross-site", "same-site", "none"):
            reply = await w.post("/sign-in", {"key": ADMIN}, sec_fetch_site=site)
            assert reply.status_code == 403
            assert "set-cookie" not in reply.headers
            assert (await w.post("/sign-out", {}, sec_fetch_site=site)).status_code == 403


ACCEPTED = {"alarm": "coverage:acme:7", "reason": "the new prompt asks for it", "actor": "ann"}


async def test_an_alarm_is_accepted_as_it_was_seen_by_an_operator_only():
    async with page_world(api_keys=KEYS) as w:
        page = (await w.get(ALARM, ADMIN)).text
        assert 'value="coverage:acme:7"' in page
        assert 'href="/turns/chatcmpl-3f' in page, "turns that show it"
        act = f"{ALARM}/accept"
        assert (await w.post(act, ACCEPTED, ACME)).status_code == 403
        assert (await w.http.post(act, data=ACCEPTED, headers={"authorization": f"Bearer {ADMIN}"})).status_code == 403
        assert (await w.post(act, ACCEPTED | {"reason": " "}, ADMIN)).status_code == 400
        assert w.acts.done == []
        assert "coverage:acme ended" in (await w.post(act, ACCEPTED, ADMIN)).text
    assert w.acts.done == [("accept", "coverage:acme", "coverage:acme:7", "the new prompt asks for it", "ann")]


async def test_what_ends_with_its_cause_has_no_form():
    async with page_world() as w:
        w.facts.acceptable = False
        page = (await w.get(ALARM)).text
        assert "This alarm cannot be accepted" in page
        assert '<form class="act"' not in page
        assert (await w.get("/monitors/none")).status_code == 404


async def test_a_turn_shows_what_its_reward_is_made_of():
    async with page_world(api_keys=KEYS) as w:
        text = (await w.get("/turns/chatcmpl-3f:0", ACME)).text
        assert "kept lines +0.50" in text
        assert "tool errors -0.10" in text
