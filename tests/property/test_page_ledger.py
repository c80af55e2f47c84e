"""Whatever the order of release events, the page's index says of a version what the release ledger says of it."""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.property.test_release_ledger import BACK_TO_AN_UNKNOWN_ONE, POLICIES, event

from ostinato.record.log import SqlLog
from ostinato.release.ledger import State, fold, is_void
from ostinato.status.index_queries import IndexQueries
from ostinato.status.log_index import Feed, PageIndex
from ostinato.testing.records import a_turn

ACTIONS = ["published", "evaluated", "looked", "canary", "ramped", "shipped", "blocked", "rolled_back"]
PREVIOUS_BELOW = [
    *(event(number, "shipped", POLICIES[number], POLICIES[number - 1] if number else None) for number in range(4)),
    event(4, "rolled_back", POLICIES[2], POLICIES[1]),
]
"""A rollback whose previous version is below the one that is live again: no controller writes that, another writer may."""


@st.composite
def histories(draw):
    """Events of any writer: `previous` need not be what is live."""
    policies = st.sampled_from(POLICIES)
    drawn = draw(st.lists(st.tuples(st.sampled_from(ACTIONS), policies, policies), max_size=24))
    return [event(i, action, policy, previous) for i, (action, policy, previous) in enumerate(drawn)]


@settings(max_examples=120, deadline=None)
@given(histories(), st.integers(1, 9))
@example(BACK_TO_AN_UNKNOWN_ONE, 1)
@example(PREVIOUS_BELOW, 9)
async def test_the_page_and_the_ledger_agree(events, restart_every):
    with tempfile.TemporaryDirectory() as root, contextlib.closing(SqlLog.open(Path(root) / "log")) as log:
        index, state, states = PageIndex(Path(root) / "page.sqlite", words=False), State(), {}
        feed = Feed(log, index, lambda: True)
        for at, row in enumerate(events):
            if at % restart_every == 0:
                index.close()
                index = PageIndex(index.path, words=False)
                feed = Feed(log, index, lambda: True)
            before, state = state, fold(state, row)
            told(states, before, state, row)
            await log.append(row)
            await feed.decided()
            found = IndexQueries(index.path, longest_s=5.0).releases(None)
            assert (found.live, found.previous) == (state.live, state.previous)
            assert {line.policy: line.state for line in found.rows} == states
        index.close()


def told(states, before, after, row):
    """The state of each version in the ledger: its last action, or that it was rolled back, which is told by what the fold changed.
    A void line is none.
    """
    if is_void(before, row):
        return
    if row.action != "looked" or row.policy not in states:
        states[row.policy] = "shipped" if row.action == "rolled_back" else row.action
    if row.action == "rolled_back":
        gone = {release.hash for release in before.releases} - {release.hash for release in after.releases}
        gone |= (after.refused - before.refused) | {row.previous.hash}
        for policy in states:
            if policy.hash in gone and policy != row.policy:
                states[policy] = "rolled_back"


async def test_a_line_whose_details_are_odd_changes_nothing_and_hides_no_other(tmp_path):
    odd = [
        replace(event(0, "evaluated", POLICIES[1], POLICIES[0]), detail={"report": None}),
        replace(event(1, "canary", POLICIES[1], POLICIES[0]), detail={"share": 0.1}),
        replace(event(2, "canary", POLICIES[1], POLICIES[0]), detail={"share": None, "salt": "s"}),
        replace(event(3, "shipped", POLICIES[1], POLICIES[0]), detail={"share": "much"}),
    ]
    with contextlib.closing(SqlLog.open(tmp_path / "log")) as log:
        for row in [*odd, event(4, "shipped", POLICIES[0], None), a_turn("t:0")]:
            await log.append(row)
        index = PageIndex(tmp_path / "page.sqlite", words=False)
        feed = Feed(log, index, lambda: True)
        await feed.decided()
        while await feed.step():
            pass
        queries = IndexQueries(index.path, longest_s=5.0)
        assert queries.releases(None).live == POLICIES[0]
        assert index._db.execute("SELECT id FROM turns").fetchall() == [("t:0",)]
        index.close()
