"""A release controller with fakes around it: refs and a log that outlive it, verdicts, simulated users, and crashes at any write."""

import random
from functools import cache

import pytest

from ostinato.core.errors import Conflict, NotFound
from ostinato.core.records import Batch, Finish, PolicyVersion, ReleaseEvent, Sampling, Span, Turn
from ostinato.core.report import Report, Verdict
from ostinato.release.config import ReleaseConfig
from ostinato.release.controller import ReleaseController
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.trial.config import TrialConfig
from ostinato.serve.arms import Arms
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal


def version(number):
    return PolicyVersion(number=number, hash=f"{number:02d}" * 16)


V0, V3, V5, V8 = (version(n) for n in (0, 3, 5, 8))


class Killed(BaseException):
    """The process died here."""


class Fuse:
    """Raises `Killed` at the n-th write, before or after its effect."""

    def __init__(self):
        self.writes, self.at, self.after = 0, None, False

    async def around(self, effect):
        self.writes += 1
        burns = self.at is not None and self.writes == self.at
        if burns and not self.after:
            raise Killed
        result = await effect()
        if burns:
            raise Killed
        return result


class Disk:
    """Refs, manifests and the log, which outlive a controller."""

    def __init__(self):
        self.fuse, self.refs, self.rows = Fuse(), {}, MemoryLog()
        self.known = {}
        self.moves = []

    def publish(self, policy):
        self.known[f"m{policy.number}"] = policy
        self.refs["candidate"] = f"m{policy.number}"

    async def move_ref(self, ref, old, new):
        async def effect():
            if self.refs.get(ref) != old:
                raise Conflict(f"{ref} is {self.refs.get(ref)}, not {old}")
            self.refs[ref] = new
            self.moves.append((ref, new))

        await self.fuse.around(effect)

    async def read_ref(self, ref):
        return self.refs.get(ref)

    async def resolve(self, ref):
        manifest = self.refs.get(ref)
        return None if manifest is None else (self.known[manifest], manifest)

    async def manifest_of(self, policy):
        for manifest, known in self.known.items():
            if known == policy:
                return manifest
        raise NotFound(f"{policy} was never published")

    async def append(self, *rows):
        if not rows:  # only asks for the newest cursor
            return await self.rows.append()
        return await self.fuse.around(lambda: self.rows.append(*rows))

    def read(self, after, kinds):
        return self.rows.read(after, kinds)

    async def before_last(self, count, kind):
        return await self.rows.before_last(count, kind)

    def events(self):
        return [(e.action, e.policy.number) for e in self.rows.rows if isinstance(e, ReleaseEvent)]


async def lived_through(disk, fresh, script):
    """Run the acts in order. A controller killed in an act is replaced by a `fresh()` one, which repeats it. Returns the ledger's lines."""
    control = fresh()
    for act in script:
        while True:
            try:
                await act(control)
                break
            except Killed:
                disk.fuse.at = None
                control = fresh()
    return disk.events()


class FakeJudge:
    """Returns scripted verdicts by candidate number, one after another; the last one repeats."""

    def __init__(self, verdicts=None):
        self.verdicts = {number: list(v) for number, v in (verdicts or {}).items()}
        self.asked, self.against, self.restored = [], [], []
        self.better = set()
        self.on_run = lambda candidate: None

    async def run(self, candidate, *, against):
        self.asked.append((candidate.number, against.live.number))
        self.against.append(against)
        self.on_run(candidate)
        queue = self.verdicts.get(candidate.number, [Verdict.SHIP])
        verdict = queue.pop(0) if len(queue) > 1 else queue[0]
        return Report(
            suite="s", suite_hash="9f", candidate=candidate, live=against.live, candidate_mean=0.5, live_mean=0.4, difference=0.1,
            lower=0.0, upper=0.2, items=9, draws=2, margin=0.05, power=0.9, verdict=verdict, reason=f"because {verdict}",
            better=candidate.number in self.better,
        )  # fmt: skip

    def evidence(self):
        return {"drawn for": self.asked[-1][0]}

    def restore(self, evidence):
        self.restored.append(evidence)


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def controller(
    disk,
    judge=None,
    time=None,
    *,
    guarded=False,
    evaluation_ref="candidate",
    best_ref=None,
    paused=lambda: False,
    steps=None,
    idle_refs=(),
    **config,
):
    judge = judge if judge is not None else FakeJudge()
    return ReleaseController(
        disk,
        disk,
        disk,
        judge,
        ReleaseConfig(**({"poll_s": 0.001, "cooldown_s": 0.0, "rollbacks_a_day": 99} | config)),
        time or Time(),
        guarded=guarded,
        evaluation_ref=evaluation_ref,
        best_ref=best_ref,
        paused=paused,
        steps=steps,
        idle_refs=idle_refs,
    )


async def started(disk, judge=None, **config):
    control = controller(disk, judge, **config)
    await control.bootstrap(V0)
    return control


async def went_back(disk, base, *, step):
    """Record that the trainer took this step from the weights of a standing release."""
    await disk.rows.append(Batch(step=step, turns=(), credits=(), reference=base, at=1.0, base=base))


async def settle(control, steps=20):
    for _ in range(steps):
        if await control.step() is None:
            return
    raise AssertionError("the controller does not come to rest")


QUICK = {
    "canary": True,
    "trial": TrialConfig(
        slot_s=10.0, limit_s=200.0, margin=0.1, first_people=60, holdback=0.5, better_after_s=60.0, most_turns_a_day=1e4
    ),
    "outcomes": OutcomeConfig(maturity_s=5.0),
}
CROWD = 200
ONE_TOKEN = Sampling(max_tokens=1)


@cache
def one_token(policy):
    return (Span(policy=policy, tokens=1),)


class Crowd:
    """Simulated users who get the arms that the gateway would deal them by the ledger, one slot at a time."""

    def __init__(self, disk, control, time, worth, *, said=True, share=1.0, each=1):
        self.disk, self.control, self.time, self.worth, self.said = disk, control, time, worth, said
        self.arms, self.turns = Arms(), 0
        self.loaded, self.verified = {"live", "canary", "previous"}, 0.0
        self.people, self.each = range(int(CROWD * share)), each
        self.random = random.Random(3)
        self.fails = {}

    async def slot(self):
        self.time.now += 9.0
        self.arms.deal(self.control.ledger.state.dealt(self.verified))
        held = {arm: self.disk.known[self.disk.refs[arm]] for arm in self.loaded}
        rows = []
        for i in self.people:
            dealt = self.arms.assign("t", f"u{i}", self.loaded)
            arm = dealt.arm
            policy = held[arm.value]
            spans, share = one_token(policy), self.fails.get(policy, 0.0)
            for _ in range(self.each):
                self.turns += 1
                failed = self.turns % 100 < 100 * share
                name = f"{self.turns}"
                turn = Turn(
                    id=name, episode=name, parent=None, user=f"u{i}", tenant="t", arm=arm, propensity=dealt.propensity, prompt_ids=(1,),
                    sampled_ids=(2,), logprobs=(-0.1,), spans=spans, sampling=ONE_TOKEN,
                    finish=Finish.ERROR if failed else Finish.STOP, text="", started_at=self.time.now, ended_at=self.time.now,
                )  # fmt: skip
                rows.append(turn)
                if self.said and not failed:
                    good = self.random.random() < self.worth[policy]
                    rows.append(a_signal(turn, "accepted" if good else "rejected", at=self.time.now, id=name))
        await self.disk.rows.append(*rows)
        self.time.now += 1.0

    async def until(self, *actions, slots=60):
        """Run slots until the controller writes one of these lines."""
        for _ in range(slots):
            await self.slot()
            for what in (self.control.step, self.control.watch):
                event = await what()
                if event is not None and event.action in actions:
                    return event
        raise AssertionError(f"no {actions} in {slots} slots: {self.disk.events()}")


async def on_trial(disk, worth, *, paused=lambda: False, rules=QUICK, **settings):
    time = Time()
    control = controller(disk, FakeJudge(), time, guarded=True, paused=paused, **rules)
    await control.bootstrap(V0)
    crowd = Crowd(disk, control, time, {V0: 0.5} | worth, **settings)
    await crowd.slot()
    await control.step()
    disk.publish(V3)
    event = await control.step()
    assert event.action == "canary"
    assert event.detail["share"] == pytest.approx(min(0.5, 60 / len(crowd.people)))
    return control, crowd
