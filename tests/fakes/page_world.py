"""The page over facts that a test writes down, in memory or behind a gateway."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
from pydantic import SecretStr
from tests.fakes.worlds_page import no_worlds

from ostinato.core.errors import Conflict
from ostinato.core.records import Arm, PolicyVersion, Sampling, Signal, Source, Span, Turn
from ostinato.core.report import BarResult, Comparison, Incumbent
from ostinato.evaluate.acceptance import Acceptance
from ostinato.release.auto.estimating import StyleEffect
from ostinato.release.auto.offpolicy import PolicyValue
from ostinato.release.monitors.dial_effect import DialEffect
from ostinato.reward.accounting import Accounting
from ostinato.reward.surrogate import SurrogateQuality
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.status.arms import ArmAcceptance
from ostinato.status.compactions import CompactionsNow, SessionRewards
from ostinato.status.dials import DialsNow
from ostinato.status.index_queries import AlarmLine, AlarmList, IndexedTurn, TurnPage
from ostinato.status.releases import (
    Dealt,
    GateLook,
    LayerChange,
    LedgerEvent,
    MeasureLook,
    RateShift,
    ReleaseDetail,
    ReleaseEvidence,
    ReleaseLine,
    ReleaseList,
    SamePrompt,
    TrialLook,
    TrialRules,
    WeightChange,
)
from ostinato.status.run_facts import AlarmDetail, TurnDetail, TurnLine, TurnList
from ostinato.status.run_report import Curve, CurvePoint, Mark
from ostinato.status.run_state import RunNow
from ostinato.status.training_state import FollowerNow, LearningNow, PublishedLine, StepSeries, SwapLine, WeightsNow
from ostinato.status.worker_status import WorkerStatus
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn
from ostinato.testing.renderer import ByteRenderer
from ostinato.web.page.app import Pages
from ostinato.web.page.operator_actions import PlaygroundAnswer

NOW = 1_795_000_000.0
ADMIN, ACME, BOLT = "admin-0123456789abcdef", "sk-acme-0123456789", "sk-bolt-9876543210"
OWN_FORM = {"sec-fetch-site": "same-origin"}


def version(number):
    return PolicyVersion(number=number, hash=f"{number + 10:02x}" * 32)


V16, V17, V18 = version(16), version(17), version(18)


def a_look(at, difference, lower, upper, verdict, draws=2):
    return GateLook(
        at=at,
        against=V16,
        suite="held-out",
        items=120,
        draws=draws,
        candidate=0.52 + difference,
        live=0.52,
        difference=difference,
        lower=lower,
        upper=upper,
        margin=0.1,
        power=0.91,
        verdict=verdict,
    )


def a_line(policy, state="shipped", live=False, difference=0.021, seq=100, reason="not worse than the margin: +2.1 pp"):
    return ReleaseLine(
        seq=seq,
        policy=policy,
        state=state,
        live=live,
        verdict="BLOCK" if state == "blocked" else "SHIP",
        difference=difference,
        lower=difference - 0.017,
        upper=difference + 0.017,
        margin=0.1,
        looks=2,
        reason=reason,
        at=NOW - 600,
    )


def an_event(action="shipped", policy=V17, previous=V16, seq=100, reason="not worse than the margin: +2.1 pp"):
    return LedgerEvent(
        seq=seq, id=f"{seq}:{action}", action=action, policy=policy, previous=previous, reason=reason, at=NOW - 600
    )


def a_trial_look(at, action, share, difference, half, people, finding, **more):
    goal = MeasureLook(
        name="share of good turns",
        role="goal",
        difference=difference,
        lower=difference - half,
        upper=difference + half,
        people=people,
    )
    facts = {"turns": 5 * people, "sees": half, "reason": f"{100 * difference:+.1f} pp", **more}
    return TrialLook(at=at, action=action, share=share, goal=goal, finding=finding, **facts)


def a_shift(name, before, after, half, means="answers that do so", harmful=False):
    return RateShift(
        name=name,
        means=means,
        before=before,
        after=after,
        lower=after - before - half,
        upper=after - before + half,
        turns_before=200,
        turns_after=180,
        people=41,
        harmful=harmful,
    )


def evidence_of(policy, words="Hello, Ann!"):
    """What a version has that came from a trial against the one before it."""
    against = version(policy.number - 1)
    latency = MeasureLook(name=words, role="guardrail", difference=0.001, lower=-0.004, upper=0.006, people=812.0)
    return ReleaseEvidence(
        against=against,
        comparisons=tuple(
            Comparison(
                suite="held-out",
                against=other,
                policy=against,
                difference=0.021,
                lower=0.004,
                upper=0.038,
                error=0.009,
                margin=0.1,
                items=120,
                draws=2,
            )
            for other in Incumbent
        ),
        bars=(BarResult(suite="safety", axis="score", value=0.99, bound=0.974, wanted=0.97, n=200, holds=True),),
        trial=(
            a_trial_look(NOW - 9000, "ramped", 0.05, -0.012, 0.09, 41.0, "undecided"),
            a_trial_look(NOW - 7000, "ramped", 0.25, 0.008, 0.05, 160.0, "undecided"),
            a_trial_look(NOW - 5000, "shipped", 0.9, 0.012, 0.03, 420.0, "not worse"),
            a_trial_look(NOW - 900, "better", None, 0.021, 0.017, 812.0, "better", measures=(latency,)),
        ),
        rules=TrialRules(margin=0.02, alpha=0.05, void_odds=1000.0),
        dealt=Dealt(candidate=2031, others=2012, expected=2021.5, odds=0.04, turns=18000, whole=True),
        rates=(
            a_shift("accepted", 0.51, 0.541, 0.05, "rated turns with a reward above 0"),
            a_shift("question", 0.11, 0.24, 0.06, "answers that ask instead of changing anything", harmful=True),
            a_shift("length", 0.52, 0.53, 0.02, "tokens of an answer, on a logarithmic scale"),
        ),
        steps=8,
        turns=1152,
        weights=WeightChange(
            since=against,
            versions=2,
            bytes=1_240_000,
            full_bytes=269_000_000,
            layers=(
                *(LayerChange(kind="self_attn.q_proj", layer=at, share=0.0004 * (at + 1)) for at in range(6)),
                *(LayerChange(kind="mlp.up_proj", layer=at, share=0.0009 * (at + 1)) for at in range(6)),
                LayerChange(kind="embed_tokens", layer=None, share=0.0001),
            ),
        ),
        examples=(
            SamePrompt(
                prompt=tuple(bytes([each]) for each in b"Say hello to Ann."),
                before="Hi",
                after=words,
                turn_before="chatcmpl-1:0",
                turn_after="chatcmpl-2:0",
            ),
        ),
    )


def a_worker(name, doing, since=12.0, **more):
    facts = {
        "pid": 7,
        "condition": "running",
        "trouble": None,
        "restarts": 0,
        "reason": None,
        "reason_at": None,
        **more,
    }
    return WorkerStatus(name=name, doing=doing, doing_since=NOW - since, since=NOW - since, **facts)


def an_arm(name, newest, point):
    return ArmAcceptance(arm=name, newest=newest, point=point, mean=2 * point.acceptance - 1, heard=point.turns)


def a_curve(arm, start):
    points = [
        CurvePoint(t=float(t), mean=start + gain, lower=start + gain - 0.06, upper=start + gain + 0.06, n=90)
        for t, gain in zip(
            range(1, 13), [0.01 * t if arm == "live" else 0.004 * (t % 3) for t in range(12)], strict=True
        )
    ]
    return Curve(arm=arm, points=tuple(points))


RUN = RunNow(
    at=NOW,
    directory="runs/default",
    url="http://127.0.0.1:8321",
    simulated=True,
    troubles=(),
    workers=(
        a_worker("serve", "serving on http://127.0.0.1:8321", 5400),
        a_worker("train", "waiting for 144 turns to learn from", 48),
        a_worker("release", "measuring v18 against v17: draw 2 of 4", 73, restarts=1, reason="was killed by SIGKILL"),
        a_worker("housekeeping", "waiting for the next round", 300),
    ),
    refs={"live": V17, "control": version(0), "evaluation": V18, "candidate": V18},
    shares={"control": 0.2, "canary": 0.0},
    pace=3.25,
    accounts=Accounting(
        ingested=8412,
        trained=6912,
        held={"arm:control": 1042, "finish:abort": 12, "stale": 232},
        waiting=214,
        rewarded=7126,
        oldest_wait=NOW - 190,
        used=0.967,
        surrogate={"default": SurrogateQuality(pairs=500, people=61, correlation=0.84, error=0.05)},
    ),
    batch=144,
    every=True,
    signals=7203,
    step=48,
    last=an_event(),
    arms=(
        an_arm("live", 17, Acceptance(turns=1604, acceptance=0.541, lower=0.516, upper=0.565)),
        an_arm("control", 0, Acceptance(turns=396, acceptance=0.233, lower=0.194, upper=0.277)),
    ),
    curves=(a_curve("live", 0.42), a_curve("control", 0.22)),
    marks=(Mark(t=4.2, label="v16"), Mark(t=8.8, label="v17")),
    rated_since=NOW - 900,
    alarms=(),
    compactions=CompactionsNow(
        asked=412,
        begun=367,
        seen=367,
        tokens=1_180,
        ratio=38.4,
        left=0.14,
        facts=38_912,
        kept=0.31,
        needed=4_120,
        found=0.84,
        found_between=(0.79, 0.88),
        rewards=SessionRewards(with_summary=0.31, without=0.38, people=(61, 214), between=(-0.17, 0.03)),
    ),
    dials=DialsNow(
        fitted=True,
        effect=DialEffect(
            since=NOW - 9 * 86_400,
            people=412,
            holdout=46,
            leaning=287,
            accepted=0.583,
            held=0.512,
            difference=0.071,
            lower=0.014,
            upper=0.128,
            token_kl=0.031,
            spent=0.21,
            mixed=0,
            full=False,
        ),
        curves=(a_curve("dials", 0.46), a_curve("holdout", 0.44)),
        since=NOW - 900,
        spread={
            "brief": (-0.61, -0.2, 0.02, 0.31, 0.9),
            "exclaims": (-1.4, -0.7, -0.12, 0.1, 0.42),
            "speaks_to_reader": (-0.3, -0.1, 0.18, 0.52, 1.1),
        },
        people=300,
        resets=4,
    ),
    styles=(
        StyleEffect(arm="none", turns=1_210, rated=402, gain=None),
        StyleEffect(
            arm="concise@a60d30c4",
            turns=3_418,
            rated=1_127,
            gain=PolicyValue(mean=0.062, lower=0.018, upper=0.106, error=0.022, users=61, turns=390.0),
        ),
    ),
)

A_TURN = Turn(
    id="chatcmpl-3f:0",
    episode="ep-1",
    parent=None,
    user="ann",
    tenant="acme",
    arm=Arm.LIVE,
    propensity=0.8,
    prompt_ids=tuple(b"Say hello to Ann."),
    sampled_ids=tuple(b"Hello, Ann! How are you?"),
    logprobs=tuple(-0.05 - 0.9 * (at % 7) for at in range(24)),
    spans=(Span(policy=V16, tokens=10), Span(policy=V17, tokens=14)),
    sampling=Sampling(max_tokens=64),
    finish=a_turn().finish,
    text="Hello, Ann! How are you?",
    started_at=NOW - 61,
    ended_at=NOW - 60,
)


def a_turn_line(turn=A_TURN, **changes):
    facts = {"seq": 50, "outcome": "trained", "value": 1.0, "step": 48, **changes}
    signals = facts.pop("signals", ("accepted",))
    return TurnLine(row=IndexedTurn(id=turn.id, **facts), turn=turn, signals=signals)


class WrittenFacts:
    """Answers with what its fields hold; `asked` are the queries of turns."""

    def __init__(self):
        self.run = RUN
        self.asked = []
        self.awaits = False
        self.acceptable = True
        self.actor = "ann"
        self.lines = [a_turn_line()]
        self.signals = (
            a_signal(A_TURN, "accepted", at=NOW - 50),
            Signal(
                id="s2",
                turn=A_TURN.id,
                tenant="acme",
                name="edited",
                value=0.5,
                source=Source.HUMAN,
                occurred_at=NOW - 40,
                received_at=NOW - 40,
                comment="nearly",
                correction="Hello Ann",
            ),
        )
        self.releases_found = ReleaseList(
            rows=(
                a_line(V18, "evaluated", difference=-0.003, seq=120, reason="not enough evidence yet"),
                a_line(V17, live=True, seq=100),
                a_line(V16, seq=80, difference=0.034),
                a_line(version(15), "blocked", difference=-0.051, seq=60, reason="significantly worse: -5.1 pp"),
                a_line(
                    version(14), "rolled_back", difference=0.011, seq=40, reason="guard: acceptance worse by 5.1 pp"
                ),
            ),
            older=None,
            counts={"shipped": 12, "blocked": 3, "rolled_back": 1, "evaluated": 31},
            live=V17,
            previous=V16,
        )
        self.reason = "not worse than the margin: +2.1 pp"
        self.alarm_line = AlarmLine(
            name="coverage:acme", reason="no feedback for 212 turns", at=NOW - 300, standing=True
        )

    def evidence(self, policy):
        """What is gathered of a release, with this test's words in it."""
        return evidence_of(policy, self.reason)

    async def now(self):
        return self.run

    async def releases(self, before):
        return self.releases_found

    async def release(self, root):
        root = self.releases_found.live.hash if root == "live" else root
        found = self.releases_found.rows
        line = next((e for e in found if e.policy.hash.startswith(root) or root == f"v{e.policy.number}"), None)
        if line is None:
            return None
        carried = {"report": {"suite": "held-out", "difference": 0.021, "items": 120}, "note": ["a", {"b": 1.5}]}
        return ReleaseDetail(
            line=line,
            looks=(a_look(NOW - 900, 0.03, -0.04, 0.1, "EXTEND", 1), a_look(NOW - 700, 0.021, 0.004, 0.038, "SHIP")),
            events=(
                (an_event(policy=line.policy, reason=self.reason), {"actor": self.actor}),
                (an_event("evaluated", line.policy, V16, 90, self.reason), carried),
            ),
            live=V17,
            previous=V16,
            kept=True,
            awaits=self.awaits and not line.live,
            evidence=self.evidence(line.policy) if line.policy == V17 else ReleaseEvidence(against=V17),
        )

    async def turns(self, query):
        self.asked.append(query)
        rows = tuple(line for line in self.lines if query.tenant in (None, line.turn.tenant))
        page = TurnPage(
            rows=tuple(line.row for line in rows),
            older=40 if len(rows) else None,
            newer=None,
            count=len(rows),
            outcomes=("arm:control", "finish:abort", "trained"),
        )
        return TurnList(rows=rows, page=page, unread=0, searchable=True)

    async def turn(self, id, tenant):
        line = next((line for line in self.lines if line.turn.id == id and tenant in (None, line.turn.tenant)), None)
        if line is None:
            return None
        return TurnDetail(
            line=line,
            prompt=tuple(bytes([token]) for token in line.turn.prompt_ids),
            sampled=tuple(bytes([token]) for token in line.turn.sampled_ids),
            signals=self.signals,
            retracted=frozenset(),
            function="copilot@1",
            decided_at=NOW - 20,
            advantage=0.42,
            released=an_event(),
            parts={"kept lines": 0.5, "tool errors": -0.1},
        )

    async def learning(self):
        points = tuple((float(step), 0.1 + 0.01 * step + 0.05 * (step % 5)) for step in range(1, 49))
        return LearningNow(
            series=(
                StepSeries(name="reward_mean", title="Mean reward of the batch's turns", unit="reward", points=points),
                StepSeries(name="ess", title="Effective sample size", unit="share of the batch", points=points),
                StepSeries(
                    name="seconds",
                    title="Duration of a step",
                    unit="seconds",
                    points=tuple((float(step), float(step % 9)) for step in range(1, 1201)),
                ),
            ),
            steps=48,
            marks=((16.0, "v16"), (17.0, "v17")),
            refused=((12, "all rewards are equal", NOW - 5000),),
            accounts=self.run.accounts,
            batch=144,
            every=True,
        )

    async def alarms(self, before):
        cleared = replace(self.alarm_line, standing=False, reason="feedback came again", at=NOW - 100)
        return AlarmList(standing=self.run.alarms, rows=(cleared, self.alarm_line), older=None)

    async def alarm(self, name):
        if name != self.alarm_line.name:
            return None
        return AlarmDetail(
            line=self.alarm_line,
            id=f"{name}:7",
            acceptable=self.acceptable,
            detail={"observed": 0.31, "reference": 0.12, "shift": "up", "who": self.reason},
            turns=tuple(self.lines),
        )

    async def weights(self):
        published = PublishedLine(
            number=18,
            hash=V18.hash,
            form="delta",
            bytes=1_240_000,
            full_bytes=269_000_000,
            changed=0.0098,
            seconds=0.41,
            at=NOW - 300,
        )
        swap = SwapLine(slot="live", number=17, pause_s=0.0031, streams=4, at=NOW - 590)
        return WeightsNow(
            refs=self.run.refs,
            published=(published,),
            swaps=(swap,),
            disk={"log": 52_000_000, "weights": 900_000_000},
            free=70_000_000_000,
            followers=(
                FollowerNow(slot="live", number=17, loaded_at=NOW - 590, wanted=V17, lag_s=2.4, behind=False),
                FollowerNow(slot="evaluation", number=17, loaded_at=NOW - 590, wanted=V18, lag_s=31.0, behind=True),
            ),
        )


class NotedActs:
    """Notes what was asked for. `live` is what a release must expect."""

    def __init__(self):
        self.done = []
        self.live = V17.hash

    async def ship(self, root, expected_live, reason, actor):
        self._check(expected_live)
        self.done.append(("ship", root, reason, actor))
        return "v18 is live"

    async def approve(self, root, expected_live, reason, actor):
        self._check(expected_live)
        self.done.append(("approve", root, reason, actor))
        return "v18 is live"

    async def refuse(self, root, expected_live, reason, actor):
        self._check(expected_live)
        self.done.append(("refuse", root, reason, actor))
        return "v18 never ships by itself"

    async def roll_back(self, expected_live, reason, actor):
        self._check(expected_live)
        self.done.append(("roll_back", reason, actor))
        return "v16 is live again"

    def _check(self, expected_live):
        if expected_live != self.live:
            raise Conflict("something else is live now, look again")

    async def accept(self, alarm, id, reason, actor):
        self.done.append(("accept", alarm, id, reason, actor))
        return f"{alarm} ended"

    async def ask(self, messages, arms):
        self.done.append(("ask", messages))
        return tuple(
            PlaygroundAnswer(arm=arm, turn=f"chatcmpl-{arm}:0", version=17 if arm == "live" else 0, text="Hello!")
            for arm in arms
        )

    async def rate(self, turn, name, correction):
        self.done.append(("rate", turn, name, correction))
        return "accepted"


class PageWorld:
    """A gateway with the page. `http` asks it, `facts` and `acts` are behind it."""

    def __init__(self, config, admin_keys=(ADMIN,), worlds=None):
        self.now = NOW
        self.facts, self.acts = WrittenFacts(), NotedActs()
        self.audited = []
        self.pages = Pages(self.facts, worlds or no_worlds(), self.acts, lambda: self.now, self.audit)
        self.app = create_app(
            engine=FakeEngine(lambda request: "hello"),
            renderer=ByteRenderer(),
            log=MemoryLog(),
            config=config,
            clock=lambda: self.now,
            model_name="m",
            admin_keys=[SecretStr(key) for key in admin_keys],
            page=self.pages.routes,
            audit=self.audit,
        )

    def audit(self, act, **facts):
        self.audited.append((act, facts))

    async def get(self, path, key=None, **headers):
        return await self.http.get(path, headers=self._headers(key, headers))

    async def post(self, path, fields, key=None, **headers):
        sent = OWN_FORM | self._headers(key, headers)
        return await self.http.post(path, data=fields, headers={name: value for name, value in sent.items() if value})

    @staticmethod
    def _headers(key, headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return named if key is None else {"x-ostinato-key": key, **named}


@asynccontextmanager
async def page_world(*, worlds=None, **config):
    """The page behind a gateway in memory."""
    world = PageWorld(ServeConfig(**config), worlds=worlds)
    transport = httpx2.ASGITransport(app=world.app, raise_app_exceptions=True)
    async with (
        world.app.router.lifespan_context(world.app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        world.http = http
        yield world
        world.pages.close()
        await asyncio.sleep(0)
    world.pages.end()
