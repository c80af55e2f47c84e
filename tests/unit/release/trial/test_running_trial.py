"""A trial that is fed from the log: every declared metric, late signals, restarts, tenants."""

import random
from dataclasses import replace

import pytest

from ostinato.core.arm_assignment import Dealing, dealing_key, place_of
from ostinato.core.errors import Unavailable
from ostinato.core.records import Arm, Finish, PolicyVersion, Span
from ostinato.release.canary import RunningTrial
from ostinato.release.ledger import TrialRecord
from ostinato.release.metrics.config import MetricConfig, OutcomeConfig, completed
from ostinato.release.metrics.retention import Retention
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.group_sequential import ShipPlan
from ostinato.release.trial.trial import Trial
from ostinato.release.trial.verdict import NextAction
from ostinato.serve.arms import Arms
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

OLD, NEW = PolicyVersion(number=0, hash="aa"), PolicyVersion(number=3, hash="bb")
CONFIG = TrialConfig(slot_s=10.0, limit_s=100.0, margin=0.05, first_people=1e6, tenant_people=20, most_turns_a_day=1e4)
MATURITY_S = 5.0
SPANS = {treated: (Span(policy=policy, tokens=2),) for treated, policy in ((False, OLD), (True, NEW))}


class Town:
    """Simulated users, half of whom meet the new version. `does` turns a good turn into what it became on an arm."""

    def __init__(
        self, does=lambda town, turn, treated: town.judged(turn, 0.6), *, users=160, tenant=lambda i: "default"
    ):
        self.does, self.users, self.tenant = does, users, tenant
        self.log, self.now, self.random = MemoryLog(), 1000.0, random.Random(5)
        self.record = None
        self.arms = {True: Arm.CANARY, False: Arm.LIVE}
        self.began = 0
        self.count = 0

    def judged(self, turn, chance):
        """The turn, and whether its user accepted it."""
        verb = "accepted" if self.random.random() < chance else "rejected"
        return turn, [a_signal(turn, verb, at=turn.ended_at + 1.0)]

    async def slot(self, turns=2):
        rows = []
        for i in range(self.users):
            treated = self.record is not None and i % 2 == 0
            for _ in range(turns):
                self.count += 1
                at = self.now + self.random.random()
                turn = replace(
                    a_turn(f"t{self.count}", user=f"u{i}", ended_at=at),
                    started_at=at - self.random.uniform(0.5, 1.5),
                    arm=self.arms[treated],
                    propensity=1.0 if self.record is None else 0.5,
                    spans=SPANS[treated],
                    tenant=self.tenant(i),
                )
                turn, signals = self.does(self, turn, treated)
                rows += [turn, *signals]
        await self.log.append(*rows)
        self.now += 10.0

    async def begin(self, slots=3):
        """Some slots without a trial, then one with half of the users."""
        for _ in range(slots):
            await self.slot()
        self.began = await self.log.append()
        self.record = TrialRecord(candidate=NEW, against=OLD, salt="s", shares=((self.now, 0.5),))

    def ship(self):
        """Half of the users stay on the release before it."""
        self.arms = {True: Arm.LIVE, False: Arm.PREVIOUS}
        self.record = replace(self.record.then(self.now, 0.5), shipped=True)

    def running(self, *declared, config=CONFIG, **outcomes):
        return RunningTrial(self.log, OutcomeConfig(maturity_s=MATURITY_S, **outcomes), config, completed(declared, ()))

    async def until_over(self, trial, slots=14):
        """The first decision that ends or ships it, else the last."""
        decision = None
        for _ in range(slots):
            await self.slot()
            decision = await trial.look(self.record, self.began, self.now + MATURITY_S)
            if decision.next in (NextAction.SHIP, NextAction.BLOCK, NextAction.ROLL_BACK):
                break
        return decision


def rising(spoil):
    """Acceptance rises from 55% to 80%; `spoil` is what else the new version does."""

    def does(town, turn, treated):
        turn, signals = town.judged(turn, 0.8 if treated else 0.55)
        return spoil(town, turn, signals) if treated else (turn, signals)

    return does


def stops(town, turn, signals):
    stopped = town.random.random() < 0.15
    return (replace(turn, finish=Finish.ABORT), []) if stopped else (turn, signals)


def fails(town, turn, signals):
    return (replace(turn, finish=Finish.ERROR, spans=()), []) if town.random.random() < 0.15 else (turn, signals)


def is_slow(town, turn, signals):
    return (replace(turn, started_at=turn.ended_at - 9.0) if town.random.random() < 0.2 else turn), signals


def annoys(town, turn, signals):
    said = [a_signal(turn, "dissatisfied", at=turn.ended_at + 2.0)] if town.random.random() < 0.2 else []
    return turn, [*signals, *said]


def hides_what_was_rejected(town, turn, signals):
    return turn, [each for each in signals if each.name == "accepted"]


async def test_a_candidate_that_is_better_in_every_way_ships():
    town = Town(rising(lambda town, turn, signals: (turn, signals)))
    await town.begin()
    decision = await town.until_over(town.running())
    assert decision.next is NextAction.SHIP
    told = decision.reading.metrics
    assert list(told) == [
        "acceptance",
        "failed",
        "stopped",
        "dissatisfied_follow_up",
        "latency_p99",
        "feedback_coverage",
        "accepted_of_all",
        "returned",
        "harmed_users",
    ]
    assert decision.reason.endswith("; no data for returned, harmed_users"), "no day is over, and users are few"
    assert told["acceptance"]["lower"] < 0.25 < told["acceptance"]["upper"]
    assert told["acceptance"]["role"] == "goal"
    assert 1.4 < told["latency_p99"]["threshold"] < 1.5
    assert not any(each["worse"] for each in told.values())


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (stops, "stopped"),
        (fails, "failed"),
        (is_slow, "latency_p99"),
        (annoys, "dissatisfied_follow_up"),
        (hides_what_was_rejected, "feedback_coverage"),
    ],
)
async def test_acceptance_rises_and_a_guardrail_breaks_so_it_is_blocked(spoil, name):
    town = Town(rising(spoil))
    await town.begin()
    decision = await town.until_over(town.running())
    assert decision.next is NextAction.BLOCK
    assert decision.reason.startswith(f"{name} worse: ")
    assert decision.reading.worse
    assert decision.reading.metrics["acceptance"]["estimate"] > 0.1
    assert decision.reading.metrics[name]["worse"]


async def test_who_silences_the_dissatisfied_does_not_ship():
    """Half of the turns are heard; the new version is accepted less often, and half of its rejections go unsaid."""

    def does(town, turn, treated):
        heard, good = town.random.random() < 0.5, town.random.random() < (0.45 if treated else 0.6)
        said = heard and (good or not treated or town.random.random() < 0.54)
        return turn, [a_signal(turn, "accepted" if good else "rejected", at=turn.ended_at + 1.0)] if said else []

    town = Town(does, users=400)
    await town.begin()
    tolerant = MetricConfig(name="feedback_coverage", tolerance=0.5)
    trial = RunningTrial(town.log, OutcomeConfig(maturity_s=MATURITY_S), CONFIG, completed([tolerant], ()))
    decision = await town.until_over(trial)
    told = decision.reading.metrics
    assert told["acceptance"]["estimate"] > -0.02, "of what is said about it, as much is good"
    assert decision.next is NextAction.BLOCK
    assert "accepted_of_all" in decision.reason


@pytest.mark.parametrize("paused", [True, False])
async def test_dials_that_help_live_alone_do_not_count_against_an_equal_candidate(paused):
    """A person's dials raise acceptance by 15 points. They would lean live's answers alone, as the candidate has no basis: so nobody's, by
    the gateway's rule. `paused` False: without it the same candidate is blocked as worse.
    """
    arms, slots = Arms(), {"live": OLD, "canary": NEW}

    def does(town, turn, treated):
        leans = not treated and not (paused and arms.compared(slots))
        return town.judged(turn, 0.6 + 0.15 * leans)

    town = Town(does, users=400)
    await town.begin()
    arms.deal(Dealing(salt=town.record.salt, canary=0.5))
    decision = await town.until_over(town.running())
    told = decision.reading.metrics["acceptance"]
    if paused:
        assert told["lower"] < 0.0 < told["upper"]
        assert abs(told["estimate"]) < 0.02
        assert decision.next is not NextAction.BLOCK
    else:
        assert told["upper"] < 0.0
        assert told["estimate"] == pytest.approx(-0.15, abs=0.03)
        assert decision.next is NextAction.BLOCK


async def test_a_guardrail_that_breaks_once_it_is_live_takes_it_back():
    harm = [0.0]

    def later(town, turn, signals):
        return (replace(turn, finish=Finish.ABORT), []) if town.random.random() < harm[0] else (turn, signals)

    town = Town(rising(later))
    await town.begin()
    trial = town.running()
    assert (await town.until_over(trial)).next is NextAction.SHIP
    town.ship()
    harm[0] = 0.2
    decision = await town.until_over(trial)
    assert decision.next is NextAction.ROLL_BACK
    assert decision.reason.startswith("stopped worse: +")


async def test_the_same_harm_to_a_diagnostic_decides_nothing():
    town = Town(rising(annoys))
    await town.begin()
    trial = town.running(MetricConfig(name="dissatisfied_follow_up", role="diagnostic"))
    decision = await town.until_over(trial)
    assert decision.next is NextAction.SHIP
    assert decision.reading.metrics["dissatisfied_follow_up"]["estimate"] > 0.1


async def test_a_goal_that_nobody_says_anything_about_never_passes():
    town = Town(rising(lambda town, turn, signals: (turn, signals)))
    await town.begin()
    declared = [MetricConfig(name="acceptance"), MetricConfig(name="edit_survival", role="goal")]
    decision = await town.until_over(town.running(*declared))
    assert decision.next is NextAction.BLOCK
    assert decision.reason == "not enough evidence: no feedback on it yet for edit_survival"
    assert decision.reading.metrics["edit_survival"]["estimate"] is None


async def test_of_two_goals_one_that_is_lost_blocks():
    def does(town, turn, treated):
        turn, signals = town.judged(turn, 0.8 if treated else 0.55)
        kept = a_signal(
            turn, "survived", at=turn.ended_at + 1.5, value=town.random.random() * (0.5 if treated else 1.0)
        )
        return turn, [*signals, kept]

    town = Town(does)
    await town.begin()
    declared = [MetricConfig(name="acceptance"), MetricConfig(name="edit_survival", role="goal")]
    decision = await town.until_over(town.running(*declared))
    assert decision.next is NextAction.BLOCK
    assert decision.reason.startswith("edit_survival worse: -2")


async def test_a_value_is_averaged_in_its_own_units():
    def does(town, turn, treated):
        stars = min(5, town.random.randint(1, 5) + treated)
        return turn, [a_signal(turn, "stars", at=turn.ended_at + 1.0, value=float(stars))]

    town = Town(does)
    await town.begin()
    stars = MetricConfig(name="stars", role="goal", numerator=("stars",), most=5.0, tolerance=0.2)
    trial = RunningTrial(town.log, OutcomeConfig(maturity_s=MATURITY_S), CONFIG, completed([stars], ["stars"]))
    decision = await town.until_over(trial)
    assert decision.next is NextAction.SHIP
    assert decision.reason.startswith("not worse than 0.2: +0.")
    assert decision.reading.metrics["stars"]["lower"] < 0.8 < decision.reading.metrics["stars"]["upper"]


async def test_who_looks_late_or_anew_reads_the_same():
    """Signals that come after a slot's turn was read change nothing, whoever reads the log and when."""
    town = Town()
    await town.begin()
    trial = town.running()
    for n in range(4):
        await town.slot()
        last = await trial.look(town.record, town.began, town.now + MATURITY_S)
        turn = next(row for row in reversed(town.log.rows) if getattr(row, "arm", None) is Arm.CANARY)
        await town.log.append(
            a_signal(turn, "rejected", at=town.now + MATURITY_S + 1.0),
            a_signal(turn, "sorry", at=town.now + MATURITY_S + 2.0, id=f"r{n}", retracts=f"{turn.id}/accepted"),
        )
    again = town.running()
    assert await again.look(town.record, town.began, town.now + MATURITY_S) == last


async def test_who_looks_late_has_taken_the_same_planned_looks_and_takes_none_again():
    town = Town()
    await town.begin()
    patient = CONFIG.model_copy(update={"margin": 0.03, "limit_s": 1e6})
    plan = ShipPlan(information={"acceptance": 2_000.0}, alpha=0.05, limit_s=1e6)
    town.record = replace(town.record, plan=plan)
    trial, seen = town.running(config=patient), []
    for _ in range(8):
        await town.slot()
        last = await trial.look(town.record, town.began, town.now + MATURITY_S)
        seen.append(last.reading.bound)
        assert await trial.look(town.record, town.began, town.now + MATURITY_S) == last, "until it was acted on"
        trial.acted()
        assert await trial.look(town.record, town.began, town.now + MATURITY_S) is None
    assert len({bound for bound in seen if bound is not None}) >= 3
    again = town.running(config=patient.model_copy(update={"ship_alpha": 0.2}))
    late = await again.look(town.record, town.began, town.now + MATURITY_S)
    assert late.reading.bound == last.reading.bound, "by the plan, whatever the settings say by now"
    assert late.reading.metrics["acceptance"]["bound"] == last.reading.bound


async def test_a_restart_in_a_long_trial_knows_what_was_known_before(caplog):
    """More turns came since the trial began than are held at once, and more before it than the trial's past holds."""
    town = Town(users=40)
    await town.begin(slots=20)
    patient = CONFIG.model_copy(update={"min_people": 1e6, "limit_s": 1e6})
    settings = {"config": patient, "window": 1_600, "past": 900}
    trial = town.running(**settings)
    for _ in range(30):
        await town.slot(turns=4)
        last = await trial.look(town.record, town.began, town.now + MATURITY_S)
    again = town.running(**settings)
    assert await again.look(town.record, town.began, town.now + MATURITY_S) == last
    assert last.reading.effect.turns > 2_000
    assert (trial.missed, again.missed) == (0, 0)


async def test_a_tenants_flood_costs_that_tenant_and_hides_nobody(caplog):
    """Everybody else's turns are judged though one tenant sends ten times as many as are held; that some were not is said."""
    town = Town(lambda town, turn, treated: town.judged(turn, 0.2 if treated else 0.6))
    await town.begin()
    trial, number = town.running(window=2_000), 0
    for _ in range(14):
        flood = []
        for _ in range(4_000):
            number += 1
            made = a_turn(f"f{number}", user=f"x{number % 50}", ended_at=town.now + 5.0)
            flood.append(replace(made, tenant="flood", propensity=0.5, spans=(Span(policy=OLD, tokens=2),)))
        await town.log.append(*flood)
        await town.slot()
        decision = await trial.look(town.record, town.began, town.now + MATURITY_S)
        if decision.next is NextAction.BLOCK:
            break
    assert decision.reason.startswith("worse: -")
    assert trial.missed > 1_000
    assert "raise release.outcomes.window" in caplog.text


async def test_only_people_who_were_dealt_by_chance_are_compared():
    """Callers without a name, or without a signed one, always get live."""

    def does(town, turn, treated):
        if int(turn.user[1:]) >= 120:
            return town.judged(replace(turn, arm=Arm.LIVE, spans=(Span(policy=OLD, tokens=2),), propensity=1.0), 0.05)
        return town.judged(turn, 0.4 if treated else 0.6)

    town = Town(does)
    await town.begin()
    decision = await town.until_over(town.running())
    assert decision.next is NextAction.BLOCK
    assert decision.reason.startswith("worse: -")


async def test_while_the_candidate_is_loading_nobody_is_dealt():
    """Its users get live's weights on the canary arm until its own are there: the balance counts from its first answer."""
    town = Town(users=400)
    await town.begin()
    town.does = lambda town, turn, treated: town.judged(
        replace(turn, spans=(Span(policy=OLD, tokens=2),), user=f"n{town.count}"), 0.6
    )
    trial = town.running(config=CONFIG.model_copy(update={"limit_s": 1e6, "min_people": 1e6}))
    for _ in range(3):
        await town.slot()
        decision = await trial.look(town.record, town.began, town.now + MATURITY_S)
    town.does = lambda town, turn, treated: town.judged(turn, 0.6)
    await town.slot()
    decision = await trial.look(town.record, town.began, town.now + MATURITY_S)
    assert decision.next in (NextAction.WAIT, NextAction.RAMP), decision.reason


async def test_a_clock_that_was_ahead_is_told_or_mended():
    town = Town(lambda town, turn, treated: town.judged(turn, 0.1 if treated else 0.6))
    await town.begin()
    trial = town.running(config=CONFIG.model_copy(update={"limit_s": 1e9}))
    with pytest.raises(Unavailable, match=r"began .* hours from now: the clock was ahead"):
        await trial.look(town.record, town.began, town.record.began - 7_200.0)
    await trial.look(town.record, town.began, town.now + 86_400.0)
    decision = await town.until_over(trial)
    assert decision.next is NextAction.BLOCK
    assert "worse: -" in decision.reason


async def test_turns_of_a_clock_that_was_ahead_hold_up_no_trial():
    """One gateway's clock was a day ahead for a moment: what it wrote lies before everybody's next turns in the log."""
    town = Town(lambda town, turn, treated: town.judged(turn, 0.1 if treated else 0.6))
    await town.begin()
    trial = town.running()
    turns = (a_turn(f"ahead{i}", user=f"u{i}", ended_at=town.now + 86_400.0) for i in range(40))
    await town.log.append(*(replace(turn, arm=Arm.LIVE, spans=SPANS[False], propensity=0.5) for turn in turns))
    decision = await town.until_over(trial)
    assert decision.next is NextAction.BLOCK
    assert "worse: -" in decision.reason


@pytest.mark.parametrize("slot_s", [0.7, 100 / 3, 3600 / 7])
def test_slots_whose_length_no_float_holds_end_one_after_another(slot_s):
    """A slot that ended where it began was added without end."""
    record = TrialRecord(candidate=NEW, against=OLD, salt="s", shares=((1_764_512_345.678, 0.5),))
    trial = Town(users=4).running(config=CONFIG.model_copy(update={"slot_s": slot_s}))
    trial._retention, trial._added_until = Retention(record.began), record.began
    for number in range(1, 100):
        trial._added_until = trial._next_end(record)
        assert trial._added_until == pytest.approx(record.began + number * slot_s, abs=1e-3)


async def asked_before(*, told):
    """The reading of a trial in which half of 200 prompts are rejected nine times in ten; without the prompts unless they are `told`."""

    def does(town, turn, treated):
        prompt = town.random.randrange(200)
        turn, signals = town.judged(turn, 0.1 if prompt % 2 else 0.9)
        return replace(turn, prompt_ids=(*range(64), prompt) if told else (), parent=None), signals

    town = Town(does)
    await town.begin(slots=6)
    trial = town.running(config=CONFIG.model_copy(update={"margin": 0.001}))
    for _ in range(2):
        await town.slot()
    return (await trial.look(town.record, town.began, town.now + MATURITY_S)).reading.metrics["acceptance"]


async def test_what_was_asked_before_the_trial_makes_its_intervals_narrower():
    told, untold = [await asked_before(told=each) for each in (True, False)]
    widths = [each["upper"] - each["lower"] for each in (told, untold)]
    assert widths[0] < 0.75 * widths[1]
    assert abs(told["estimate"] - untold["estimate"]) < widths[1] / 2


async def test_people_who_were_not_seen_for_a_week_are_forgotten_though_no_trial_begins():
    log, day = MemoryLog(), 86_400.0
    turns = (replace(a_turn(f"t{i}", user=f"u{i}", ended_at=i * day / 50), tenant="acme") for i in range(3_000))
    await log.append(*turns)
    trial = RunningTrial(log, OutcomeConfig(window=100), CONFIG)
    trial._reactions = trial._from(0)
    await trial.first_share(60 * day)
    assert 300 <= len(trial._past._people) <= 500, "fifty a day"


async def test_tenants_are_compared_within_themselves_and_small_ones_as_one():
    """One tenant accepts nearly everything and mostly meets the new version: pooled, it would look better."""

    def does(town, turn, treated):
        return town.judged(turn, 0.9 if turn.tenant == "easy" else 0.3)

    def tenant(i):
        return ("easy" if i % 8 in (0, 2, 3, 6) else "hard") if i < 160 else f"tiny{i % 8 // 4}"

    town = Town(does, users=176, tenant=tenant)
    await town.begin()
    trial = town.running()
    for _ in range(3):
        await town.slot()
        decision = await trial.look(town.record, town.began, town.now + MATURITY_S)
    told = decision.reading.metrics["acceptance"]
    assert set(told["tenants"]) == {"easy", "hard", ""}
    assert abs(told["estimate"]) < 0.05, "three quarters of the treated are easy, and a quarter of the others"


DAY = 86_400.0
DAYS = TrialConfig(slot_s=DAY / 4, limit_s=10 * DAY, min_people=20, min_turns=50, first_people=1e6, tenant_people=1e6)


class Leavers:
    """Users who come on nine days of ten, dealt by their place as the gateway does. A share of the candidate's never comes again."""

    def __init__(self, leave=0.0, *, users=600, seed=3):
        self.log, self.random, self.leave, self.users, self.count = MemoryLog(), random.Random(seed), leave, users, 0
        self.began, self.gone = 1_000.0 + 3 * DAY, set()
        self.record = TrialRecord(candidate=NEW, against=OLD, salt="s", shares=((self.began, 0.5),))

    async def day(self, number, arms=(Arm.CANARY, Arm.LIVE)):
        """All turns of a day; days before 0 are the past."""
        rows, key = [], dealing_key("s")
        for i in range(self.users):
            # a fifth comes every third day only
            if i in self.gone or self.random.random() > (0.3 if i % 5 == 0 else 0.9):
                continue
            at = self.began + (number + self.random.random()) * DAY
            treated = number >= 0 and place_of(key, "default", f"u{i}") < self.record.share(at)
            self.count += 1
            turn = replace(
                a_turn(f"t{self.count}", user=f"u{i}", ended_at=at),
                arm=arms[0] if treated else arms[1],
                propensity=1.0 if number < 0 else 0.5,
                spans=(Span(policy=NEW if treated else OLD, tokens=2),),
            )
            rows.append((at, turn))
            if treated and self.random.random() < self.leave:
                self.gone.add(i)
        await self.log.append(*(turn for _, turn in sorted(rows, key=lambda row: row[0])))

    async def trial(self, days, config=DAYS):
        for number in (-3, -2, -1):
            await self.day(number)
        self.start = await self.log.append()
        for number in range(days):
            await self.day(number)
        return RunningTrial(self.log, OutcomeConfig(maturity_s=0.0), config)

    async def look(self, trial, days):
        return await trial.look(self.record, self.start, self.began + days * DAY)


async def test_users_who_do_not_come_again_block_though_nobody_says_anything():
    town = Leavers(leave=0.3)
    trial = await town.trial(4)
    decision = await town.look(trial, 1)
    assert decision.reading.metrics["returned"]["estimate"] is None, "on the first day nobody can have come again"
    decision = await town.look(trial, 1.9)
    assert decision.reading.metrics["returned"]["estimate"] is None, "who has not come yet may still come"
    decision = await town.look(trial, 4)
    told = decision.reading.metrics["returned"]
    assert decision.next is NextAction.BLOCK
    assert decision.reason.startswith("returned worse: -")
    assert told["lower"] < -0.3 < told["upper"]
    assert told["turns"] > 600, "who left is one row a day all the same"
    again = RunningTrial(town.log, OutcomeConfig(maturity_s=0.0), DAYS)
    assert await town.look(again, 4) == decision, "a restart reads the same"


async def test_users_who_come_as_often_are_no_loss_though_the_share_grows():
    """Those who are moved by a share that grew are seen as treated only if they come: by their turns they would seem to come more often."""
    town = Leavers(users=900)
    town.record = replace(town.record, shares=((town.began, 0.1), (town.began + 1.4 * DAY, 0.5)))
    trial = await town.trial(4)
    decision = await town.look(trial, 4)
    told = decision.reading.metrics["returned"]
    assert abs(told["estimate"]) < 0.05, "by the arms of turns it would be 0.11"
    often, seldom = (trial._expected.of(("default", user))[-2] for user in ("u1", "u5"))
    assert often > seldom + 0.05, "the week before says who comes often"


async def test_slots_tell_the_share_under_which_their_people_were_dealt(monkeypatch):
    """That of their turns; of users' days the share at which the day began."""
    told, add = {"failed": [], "returned": []}, Trial.add

    def seen(self, came, outcomes, ended_s):
        for name, shares in told.items():
            shares += [slot.share for slot in outcomes[name].values()]
        add(self, came, outcomes, ended_s)

    monkeypatch.setattr(Trial, "add", seen)
    town = Leavers(users=60)
    town.record = replace(town.record, shares=((town.began, 0.1), (town.began + 1.4 * DAY, 0.5)))
    trial = await town.trial(4)
    await town.look(trial, 4)
    assert told == {"failed": [0.1] * 6 + [0.5] * 11, "returned": [0.1, 0.5, 0.5]}


async def test_a_release_that_shipped_is_still_watched_for_users_who_leave():
    town = Leavers()
    trial = await town.trial(2)
    assert (await town.look(trial, 2)).reading.metrics["returned"]["worse"] is False
    town.record = replace(town.record.then(town.began + 2 * DAY, 0.5), shipped=True)
    town.leave = 0.3
    for number in range(2, 5):
        await town.day(number, arms=(Arm.LIVE, Arm.PREVIOUS))
    decision = await town.look(trial, 5)
    assert decision.next is NextAction.ROLL_BACK
    assert decision.reason.startswith("returned worse: -")
