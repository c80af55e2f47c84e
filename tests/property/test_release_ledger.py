"""Whatever the order of events, the folded ledger keeps its promises."""

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.release.ledger import ReleaseLedger, State, fold
from ostinato.testing.log import MemoryLog

POLICIES = [PolicyVersion(number=n, hash=f"{n:064x}") for n in range(6)]


@st.composite
def histories(draw):
    """Events as a controller writes them, with unknown actions of other writers in between."""
    events, state = [], fold(State(), event(0, "shipped", POLICIES[0], None))
    events.append(event(0, "shipped", POLICIES[0], None))
    for i in range(draw(st.integers(0, 30))):
        action = draw(
            st.sampled_from(
                ["published", "evaluated", "canary", "ramped", "better", "shipped", "blocked", "rolled_back"]
            )
        )
        policy = draw(st.sampled_from(POLICIES))
        if action == "rolled_back" and policy == state.live:
            continue
        events.append(event(i + 1, action, policy, state.live))
        state = fold(state, events[-1])
    return events


def event(i, action, policy, previous):
    details = {
        "evaluated": {"report": {"verdict": "SHIP", "better": i % 3 == 0}},
        "canary": {"share": 0.05, "salt": f"{i}"},
        "ramped": {"share": 0.25},
        "shipped": {"share": 0.9} if i % 2 else {},
    }
    detail = details.get(action, {})
    return ReleaseEvent(
        id=str(i), action=action, policy=policy, previous=previous, reason=action, detail=detail, at=float(i)
    )


BACK_TO_AN_UNKNOWN_ONE = [
    event(0, "shipped", POLICIES[0], None),
    event(1, "rolled_back", POLICIES[1], POLICIES[0]),
    event(4, "shipped", POLICIES[1], POLICIES[1]),
]


@given(histories())
@example(BACK_TO_AN_UNKNOWN_ONE)
def test_fold_keeps_live_released_and_refused_apart(events):
    state = State()
    for row in events:
        before, state = state, fold(state, row)
        assert state.events == before.events + 1
        match row.action:
            case "shipped" | "rolled_back":
                assert state.live == row.policy
                assert row.policy.hash not in state.refused
                assert state.canary is None
                assert state.verdict is None
            case "blocked":
                assert row.policy.hash in state.refused
                assert state.settled(row.policy)
                assert state.live == before.live
            case _:
                assert state.live == before.live
                assert state.refused == before.refused
        if row.action == "rolled_back":
            assert before.live.hash in state.refused
            assert before.live not in state.releases
        assert len({release.hash for release in state.releases}) == len(state.releases)
        assert state.best is not None
        if row.action in ("evaluated", "blocked", "canary"):
            assert state.best == before.best, "only a release or a rollback moves it"
        if state.best not in (before.best, row.policy):
            assert row.action == "rolled_back"
        assert row.action != "rolled_back" or before.live != state.best


@given(histories(), st.integers(0, 30))
async def test_reading_in_parts_equals_reading_at_once(events, cut):
    log = MemoryLog()
    ledger = ReleaseLedger(log, lambda: 0.0)
    await log.append(*events[:cut])
    await ledger.refresh()
    await log.append(*events[cut:])
    whole = State()
    for row in events:
        whole = fold(whole, row)
    assert await ledger.refresh() == whole


@given(histories())
async def test_two_writers_of_one_conclusion_write_one_event(events):
    log = MemoryLog()
    await log.append(*events)
    first, second = ReleaseLedger(log, lambda: 99.0), ReleaseLedger(log, lambda: 99.5)
    one, other = await asyncio.gather(*(ledger.append("blocked", POLICIES[5], None, "x") for ledger in (first, second)))
    assert one.id == other.id
    assert len(log.rows) == len(events) + 1
    assert first.state == second.state
