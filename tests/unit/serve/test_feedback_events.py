import difflib
from datetime import UTC, datetime

import pytest

from ostinato.core.errors import BadRequest, TooLarge
from ostinato.core.records import LineSurvival, Source
from ostinato.reward.functions import copilot
from ostinato.serve.feedback.intake import parse_feedback
from ostinato.testing.records import a_turn

KEPT = {"argument": "content", "of": 12, "followed": "1-12", "kept": "1-5, 9"}
EVENT = {"id": "s1", "target": "R:2", "name": "accepted", "value": True, "source": "human"}


def parse(body, tenant="default"):
    return parse_feedback(body, tenant=tenant, now=1000.0)


def test_values_times_and_targets():
    (signal,) = parse(EVENT | {"value": False, "occurred_at": 5, "comment": "c", "correction": "d", "retracts": "s0"})
    assert (signal.turn, signal.value, signal.occurred_at, signal.received_at) == ("R:2", 0.0, 5.0, 1000.0)
    assert (signal.comment, signal.correction, signal.retracts, signal.source) == ("c", "d", "s0", Source.HUMAN)
    assert parse(EVENT | {"value": -2.5, "target": "R"})[0].turn == "R:0"
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "2026-01-31T12:00:00"):
        assert parse(EVENT | {"occurred_at": text})[0].occurred_at == noon
    assert parse(EVENT)[0].occurred_at == 1000.0
    assert parse({k: v for k, v in EVENT.items() if k != "value"} | {"retracts": "s0"})[0].value == 0.0


@pytest.mark.parametrize(("names", "value"), [(("accepted", "undone"), -0.25), (("undone", "accepted"), 0.75)])
def test_of_a_list_without_times_the_last_event_decides_whatever_the_ids(names, value):
    """As a client sends what it queued while the gateway was away."""
    now = 1_796_059_000.0  # at today's times a float has steps of a quarter of a microsecond
    events = [EVENT | {"id": id, "name": name} for id, name in zip(("z", "a"), names, strict=True)]
    signals = parse_feedback(events, tenant="default", now=now)
    turn = a_turn("R:2", ended_at=now - 10.0)
    assert copilot(turn, signals, now + 30.0, window=30.0).value == value


def test_a_tool_call_names_the_turn_that_made_it():
    assert parse(EVENT | {"target": "call_chatcmpl-3f_2_1"})[0].turn == "chatcmpl-3f:2"
    assert parse(EVENT | {"target": "call_of_another"})[0].turn == "call_of_another:0"


def test_lines_that_survive_are_of_the_call_that_is_named():
    call = EVENT | {"target": "call_chatcmpl-3f_2_1", "lines": [KEPT, {"argument": "b", "of": 2, "kept": ""}]}
    one, other = parse(call)[0].lines
    assert one == LineSurvival(call=1, argument="content", lines=12, followed=((1, 12),), kept=((1, 5), (9, 9)))
    assert other == LineSurvival(call=1, argument="b", lines=2, followed=((1, 2),), kept=())
    assert parse(EVENT | {"lines": [{"of": 3, "kept": "2"}]})[0].lines[0].call is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ""}, "id"),
        ({"id": "x" * 257}, "id"),
        ({"id": None}, "id"),
        ({"target": 5}, "target"),
        ({"name": "has space"}, "name"),
        ({"value": "yes"}, "value"),
        ({"value": None}, "value"),
        ({"value": float("inf")}, "value"),
        ({"value": 10**400}, "value"),
        ({"value": 1e200}, "value"),
        ({"value": -1.1e9}, "value"),
        ({"value": float("nan")}, "value"),
        ({"id": "a\nb"}, "id"),
        ({"id": "a\x9b2Jb"}, "id"),
        ({"retracts": "a\u2028b"}, "retracts"),
        ({"target": "a\x00"}, "target"),
        ({"source": "robot"}, "source"),
        ({"occurred_at": "yesterday"}, "occurred_at"),
        ({"occurred_at": -1}, "occurred_at"),
        ({"occurred_at": 1e300}, "occurred_at"),
        ({"occurred_at": True}, "occurred_at"),
        ({"valeu": 1}, "valeu"),
        ({"lines": "1-5"}, "lines"),
        ({"lines": [KEPT | {"of": 10**9}]}, "lines[0].of"),
        ({"lines": [KEPT | {"of": 0}]}, "lines[0].of"),
        ({"lines": [KEPT | {"kept": "1-1000000000"}]}, "lines[0].kept"),
        ({"lines": [KEPT | {"kept": "13"}]}, "lines[0].kept"),
        ({"lines": [KEPT | {"kept": "1-5, 5-9"}]}, "lines[0].kept"),
        ({"lines": [KEPT | {"kept": "1, " * 5_000 + "2"}]}, "lines[0].kept"),
        ({"lines": [KEPT | {"followed": "2-12", "kept": "1-5"}]}, "lines"),
        ({"lines": [KEPT | {"argument": "new string"}]}, "lines[0].argument"),
        ({"lines": [KEPT | {"text": "x = 1"}]}, "lines[0].text"),
        ({"lines": [KEPT, KEPT]}, "lines"),
        ({"lines": [KEPT | {"argument": f"a{i}"} for i in range(17)]}, "lines"),
    ],
)
def test_a_bad_field_is_named_alone_and_in_a_list(change, field):
    with pytest.raises(BadRequest) as caught:
        parse(EVENT | change)
    assert caught.value.field == field
    with pytest.raises(BadRequest) as caught:
        parse([EVENT, EVENT | change])
    assert caught.value.field == f"[1].{field}"


def test_what_is_obvious_may_be_left_out():
    one, other = parse([{"target": "R", "name": "accepted", "value": True}] * 2)
    assert one.source is Source.HUMAN
    assert one.id != other.id, "two events, and not one that was sent twice"
    assert one.id.startswith("fb-")


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(BadRequest) as caught:
        parse({"name": "has space", "source": "robot", "occurred_at": "yesterday", "valeu": 1})
    said = str(caught.value)
    assert caught.value.field == "target"
    for part in (
        "target is missing;",
        "name: String should match pattern",
        "value is missing; send true, false or a finite number;",
        "source must be one of human, implicit, code, llm;",
        "occurred_at is not an ISO 8601 time;",
        "Unknown field 'valeu'; the nearest valid one is 'value'.",
    ):
        assert part in said
    with pytest.raises(BadRequest, match=r"^\[1\].target is missing; \[2\].value is missing; send .*number\.$"):
        parse([EVENT, {"name": "kept", "value": 1}, {"name": "kept", "target": "R"}])


def test_a_long_list_of_errors_ends():
    with pytest.raises(BadRequest, match=r"\[9\]\.target is missing; the 990 events after \[9\] were not checked\.$"):
        parse([{"name": "kept", "value": 1}] * 1000)
    with pytest.raises(BadRequest, match=r"\[9\]\.target is missing\.$"):
        parse([{"name": "kept", "value": 1}] * 10)


@pytest.fixture
def compared(monkeypatch):
    """The lengths of the names that were compared with valid ones."""
    found, real = [], difflib.get_close_matches

    def compare(name, *rest, **how):
        found.append(len(name))
        return real(name, *rest, **how)

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    return found


def test_of_very_many_unknown_fields_few_are_compared_and_the_rest_counted(compared):
    with pytest.raises(BadRequest, match=r"Unknown field 'u9'.*; and 3990 more\.$"):
        parse(EVENT | {f"u{number}": 0 for number in range(4_000)})
    assert len(compared) == 10
    with pytest.raises(BadRequest, match=r"The body has 100005 fields; at most 4096 are taken"):
        parse(EVENT | {f"u{number}": 0 for number in range(100_000)})


def test_of_many_bad_events_few_are_looked_at(compared):
    with pytest.raises(BadRequest, match="the 990 events after"):
        parse([EVENT | {f"u{number}": 0 for number in range(20)}] * 1000)
    assert len(compared) == 100


def test_a_very_long_name_is_cut_before_it_is_compared_or_shown(compared):
    with pytest.raises(BadRequest) as caught:
        parse(EVENT | {"u" * 1_000_000: 0})
    assert compared == [100]
    assert len(str(caught.value)) < 300


def test_a_list_is_bounded():
    assert len(parse([EVENT] * 1000)) == 1000
    with pytest.raises(TooLarge):
        parse([EVENT] * 1001)
    for bad in ([], 5, "x", None, [5]):
        with pytest.raises(BadRequest):
            parse(bad)


def test_an_id_is_its_tenants_own_to_the_letter():
    for tenant in ("default", "acme"):
        (signal,) = parse(EVENT | {"id": "acme/s1", "retracts": "acme/s0"}, tenant)
        assert (signal.tenant, signal.id, signal.retracts) == (tenant, "acme/s1", "acme/s0")


def test_the_largest_values_pass():
    assert [parse(EVENT | {"value": value})[0].value for value in (1e9, -1e9, 0.5, True)] == [1e9, -1e9, 0.5, 1.0]
