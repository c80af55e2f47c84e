"""What the gateway's calls and the page tell the audit trail, and that no key is in it."""

from gateway_world import ADMIN, world
from tests.fakes import page_world as page

from ostinato.core.audit import fingerprint

KEY, WRONG = "0123456789abcdef", "wrong-0123456789abcdef"
SETTINGS = {"api_keys": [f"acme:{KEY}"], "admin_key": ADMIN}
FORM = {"expected_live": page.V17.hash, "reason": "it is better", "actor": "ann"}
SHIP = f"/releases/{page.V18.hash}/ship"


async def test_a_wrong_key_is_recorded_by_its_fingerprint_and_its_place():
    async with world(**SETTINGS) as w:
        await w.chat(headers=w.key(WRONG))
        await w.get("/metrics", w.key(WRONG))
        ((act, facts), (_, more)) = w.audited
        assert (act, facts["result"], facts["key"], facts["address"]) == (
            "wrong key",
            "refused",
            fingerprint(WRONG.encode()),
            "127.0.0.1",
        )
        assert (facts["path"], more["path"]) == ("/v1/chat/completions", "/metrics")
        assert WRONG not in str(w.audited)


async def test_neither_calls_without_a_key_nor_right_ones_are_recorded():
    async with world(**SETTINGS) as w:
        assert (await w.chat())[0] == 401
        assert (await w.chat(headers=w.key(KEY)))[0] == 200
        assert (await w.get("/health", w.key(WRONG)))[0] == 200
        assert w.audited == []


async def test_a_choice_of_weights_is_recorded_once_an_hour():
    async with world(**SETTINGS) as w:
        headers = w.key(ADMIN, **{"x-ostinato-slot": "live"})
        for _ in range(3):
            assert (await w.chat(headers=headers))[0] == 200
        ((act, facts),) = w.audited
        assert (act, facts["slot"], facts["key"]) == ("chose a slot", "live", fingerprint(ADMIN.encode()))
        w.now += 3600.0
        await w.chat(headers=headers)
        assert len(w.audited) == 2
        assert (await w.chat(headers=w.key(KEY, **{"x-ostinato-slot": "live"})))[0] >= 400
        assert len(w.audited) == 2
        w.now -= 3000.0  # a clock that was ahead silences nothing once it is set back
        await w.chat(headers=headers)
        assert len(w.audited) == 3


async def test_every_act_on_the_page_leaves_a_line():
    async with page.page_world(api_keys=[f"acme:{page.ACME}"]) as w:
        acts = {
            SHIP: "ship",
            f"/releases/{page.V18.hash}/approve": "approve",
            f"/releases/{page.V18.hash}/refuse": "refuse",
            "/rollback": "roll back",
        }
        for path in acts:
            assert (await w.post(path, FORM, page.ADMIN)).status_code == 200
        assert [act for act, _ in w.audited] == list(acts.values())
        assert {facts["key"] for _, facts in w.audited} == {fingerprint(page.ADMIN.encode())}
        assert {(facts["result"], facts["stranger"]) for _, facts in w.audited} == {("done", False)}
        assert w.audited[0][1]["root"] == page.V18.hash


async def test_what_was_refused_is_recorded_with_who_tried():
    async with page.page_world(api_keys=[f"acme:{page.ACME}"]) as w:
        await w.post(SHIP, FORM, page.ACME)
        await w.post(SHIP, FORM)  # nobody: no line
        await w.post(SHIP, {**FORM, "expected_live": ""}, page.ADMIN)
        assert [(act, facts["result"], facts["tenant"]) for act, facts in w.audited] == [
            ("ship", "refused (403)", "acme"),
            ("ship", "refused (400)", ""),
        ]


async def test_a_wrong_key_of_a_program_that_asks_for_pages_is_recorded():
    async with page.page_world(api_keys=[f"acme:{page.ACME}"]) as w:
        assert (await w.get("/turns", page.ACME)).status_code == 200
        assert (await w.get("/turns")).status_code == 303  # nobody: no line
        assert (await w.get("/turns", WRONG)).status_code == 303
        await w.post(SHIP, FORM, WRONG)
        seen = [(act, facts["result"], facts["key"]) for act, facts in w.audited]
        told = fingerprint(WRONG.encode())
        assert seen == [("wrong key", "refused", told), ("wrong key", "refused (401)", told)]
        assert WRONG not in str(w.audited)


async def test_signing_in_is_recorded_and_so_is_a_wrong_key():
    async with page.page_world(api_keys=[f"acme:{page.ACME}"]) as w:
        for key in (page.ACME, page.ADMIN, WRONG):
            await w.post("/sign-in", {"key": key, "back": "/"})
        seen = [(act, facts["result"], facts["key"], facts["tenant"]) for act, facts in w.audited]
        assert seen == [
            ("sign in", "done", fingerprint(page.ACME.encode()), "acme"),
            ("sign in", "done", fingerprint(page.ADMIN.encode()), ""),
            ("wrong key", "refused (401)", "", ""),
        ]
        assert not any(key in str(w.audited) for key in (page.ACME, page.ADMIN, WRONG))


async def test_no_key_holder_can_fill_the_audit_trail():
    async with page.page_world(api_keys=[f"acme:{page.ACME}"]) as w:
        for key in (page.ACME, page.ADMIN, WRONG):
            await w.post(SHIP, FORM, key)
        for key in (page.ACME, page.ADMIN, WRONG):
            await w.post("/sign-in", {"key": key, "back": "/"})
        limited = [(act, facts["tenant"]) for act, facts in w.audited if facts["stranger"]]
        assert limited == [("ship", "acme"), ("wrong key", ""), ("sign in", "acme"), ("wrong key", "")]
        assert [act for act, facts in w.audited if not facts["stranger"]] == ["ship", "sign in"]
