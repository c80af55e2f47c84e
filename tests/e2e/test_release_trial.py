"""A release is tried on some users first, through the real processes: who is dealt what, and what the ledger says about it. Beside the
trial a fifth of the others follow training.
"""

import asyncio

from tests.deadlines import LEARNING_S

from ostinato.app.storage import open_run
from ostinato.core.records import Arm, Batch, ReleaseEvent, Turn

TRIAL = (
    "model.numerics=fast",
    "release.canary=true",
    "release.outcomes.maturity_s=0.5",
    "release.trial.slot_s=2",
    "release.trial.first_people=20",
    "release.trial.min_people=4",
    "release.trial.min_turns=20",
    "release.trial.margin=0.3",
    "release.trial.risk=0.4",
    "release.trial.holdback=0.4",
    "release.trial.better_evidence=2",
    "release.trial.better_after_s=0",
    # sixty users who ask as fast as they can: a day's 20 turns are over in seconds, and what looks worse by chance would stay so
    "release.trial.most_turns_a_day=1e6",
    # a busy machine delays a request in a hundred by seconds, of whichever arm; and a tiny model's second step may really be some points
    # worse, so the guardrail on acceptance has the goal's margin
    "release.metrics=[{name='latency_p99', role='diagnostic'}, {name='accepted_of_all', tolerance=0.3}]",
    "serve.control_share=0.1",
    "serve.learner_share=0.2",
)


class Seen:
    """What the log holds of these kinds, read on from where it was read before."""

    def __init__(self, log) -> None:
        self._log, self._upto = log, 0
        self.events: list[ReleaseEvent] = []
        self.turns: list[Turn] = []
        self.batches: list[Batch] = []

    async def read_on(self) -> None:
        lists = {ReleaseEvent: self.events, Turn: self.turns, Batch: self.batches}
        async for at, row in self._log.read(self._upto, set(lists)):
            self._upto = at
            lists[type(row)].append(row)


def turns_of(release: ReleaseEvent, arm: Arm, turns: list[Turn]) -> list[Turn]:
    """The turns of this arm that the release's predecessor served."""
    return [turn for turn in turns if turn.arm is arm and {span.policy for span in turn.spans} == {release.previous}]


def follows(turns: list[Turn], events: list[ReleaseEvent], batches: list[Batch]) -> list[Turn]:
    """The turns of the learner arm that were learned from and that a step made that nobody had released or tried yet."""
    known = {event.policy: event.at for event in reversed(events) if event.action in ("canary", "shipped")}
    learned = {turn for batch in batches for turn in batch.turns}
    return [
        turn
        for turn in turns
        if turn.arm is Arm.LEARNER
        and turn.id in learned
        and all(turn.ended_at < known.get(span.policy, float("inf")) for span in turn.spans)
    ]


async def test_a_candidate_meets_some_users_goes_live_and_is_proven_beside_those_who_stayed(
    tmp_path, running, simulated_users
):
    run = await running(tmp_path, *TRIAL)
    with open_run(run.config) as opened:
        seen = Seen(opened.log)
        events, turns = seen.events, seen.turns
        try:
            async with simulated_users(run, 60) as acked, asyncio.timeout(LEARNING_S):
                while True:
                    await seen.read_on()
                    shipped = [event for event in events if event.action == "shipped" and "share" in event.detail]
                    ahead = follows(turns, events, seen.batches)
                    # the trial alone may prove a release better: nobody stays behind for that one
                    if ahead and any(len(turns_of(release, Arm.PREVIOUS, turns)) > 5 for release in shipped):
                        break
                    await asyncio.sleep(0.5)
        finally:
            await run.stop()
    assert acked.failures == 0
    first, begun = shipped[0], [event for event in events if event.action == "canary"]
    assert "canary not worse than 30.0 pp" in first.reason
    # what is no worse may seem so among so few people: then another candidate was tried before
    assert [event.policy for event in begun if event.at < first.at][-1] == first.policy

    def served(arm, *, until=float("inf")):
        return {span.policy for turn in turns if turn.arm is arm and turn.ended_at < until for span in turn.spans}

    assert first.policy in served(Arm.CANARY, until=first.at)
    assert served(Arm.LIVE, until=first.at) == {first.previous}, "nobody else met it before it shipped"
    shares = {round(turn.propensity, 6) for turn in turns if turn.arm is Arm.CANARY and turn.ended_at < first.at}
    dealt = [e.detail["share"] for e in events if e.action in ("canary", "ramped") and e.at < first.at]
    assert shares <= {round(0.9 * 0.8 * share, 6) for share in dealt}
    stayed = [turn for turn in turns if turn.arm is Arm.PREVIOUS]
    assert {round(turn.propensity, 6) for turn in stayed} <= {round(0.9 * 0.8 * 0.4, 6)}
    assert {turn.user for turn in stayed} & {turn.user for turn in turns if turn.arm is Arm.CONTROL} == set()

    following = [turn for turn in turns if turn.arm is Arm.LEARNER]
    assert {round(turn.propensity, 6) for turn in following} == {round(0.9 * 0.2, 6)}
    since, who = min(turn.ended_at for turn in following), {turn.user for turn in following}
    elsewhere = {turn.arm for turn in turns if turn.user in who and turn.started_at > since}
    assert elsewhere == {Arm.LEARNER}, "they take part in no trial, and stay"
