"""The prior that gateways fit to the log's people: who is in it, when it is written, and that every gateway reads the same one."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.unit.adapt.people import BASIS, about, cache_at, steered_turn

from ostinato.adapt.config import AdaptConfig, TenantAdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.core.errors import StorageFull
from ostinato.core.records import Consent, ConsentGiven, Person, Row, Sampling, Signal, SteeringBasis, Turn
from ostinato.core.steering import DialPrior
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.keys import KeyRing, Scope
from ostinato.record.log import SqlLog
from ostinato.testing.log import MemoryLog

CONFIG = AdaptConfig(mode="dials", users="declared", holdout=0.0, prior_people=20)
DAY = CONFIG.prior_every_s
ANN, BOB, NEW = ("acme", "user 3"), ("acme", "user 4"), ("acme", "nobody yet")
CROWD = [("acme", f"user {number}") for number in range(24)]
OTHERS = [("bolt", f"user {number}") for number in range(24)]


def rated(people: Sequence[Person], wish: Sequence[float] = (1.0, -1.0, 0.0), ratings: int = 5) -> list[Row]:
    """Rated answers of people who like those that lie along `wish`. The same ones at each call."""
    return list(_rated(tuple(people), tuple(wish), ratings))


@cache
def _rated(people: Sequence[Person], wish: Sequence[float], ratings: int) -> list[Row]:
    rows = list[Row]()
    for k in range(ratings):
        for tenant, user in people:
            turn = steered_turn(f"{tenant} {user} {k}:0", (tenant, user), 100.0 + k)
            assert turn.steered is not None
            liked = float(np.dot(turn.steered.features, wish) > 0)
            rows += [turn, about(turn, f"s {tenant} {user} {k}", value=liked)]
    return rows


class Gateway:
    """A gateway's dials, with a clock of its own."""

    def __init__(self, log: MemoryLog | SqlLog, directory: Path, config: AdaptConfig = CONFIG, **more: object) -> None:
        self.now, self.log = 1000.0, log
        ring = more.pop("ring", None)
        assert ring is None or isinstance(ring, KeyRing)
        self.cache = cache_at(directory, ring, most=config.most_states)
        self.dials = DialAdaptation(log, self.cache, config, clock=lambda: self.now, **more)  # type: ignore[arg-type]

    async def refit(self) -> bool:
        await self.dials.follow()
        written = await self.dials.refit()
        await self.dials.follow()
        return written

    def leans(self, person: Person = NEW) -> tuple[float, ...]:
        steering = self.dials.steering(person, weights=BASIS.weights, verified=False)
        assert steering is not None
        return steering.dials


async def log_with(rows: Sequence[Row]) -> MemoryLog:
    log = MemoryLog()
    await log.append(SteeringBasis.of(BASIS, at=1.0), *rows)
    return log


def priors(log: MemoryLog) -> list[DialPrior]:
    return [row for row in log.rows if isinstance(row, DialPrior)]


def without(rows: Sequence[Row], people: Collection[Person]) -> list[Row]:
    turns = {row.id for row in rows if isinstance(row, Turn) and row.person in people}
    return [row for row in rows if not isinstance(row, Turn | Signal) or getattr(row, "turn", row.id) not in turns]


def numbers(row: DialPrior) -> DialPrior:
    """Without its place in the log."""
    return replace(row, upto=0, number=0, at=0.0)


async def fit_of(rows: Sequence[Row], directory: Path, config: AdaptConfig = CONFIG) -> DialPrior:
    """The prior that is fitted to these rows."""
    log = await log_with(rows)
    assert await Gateway(log, directory, config).refit()
    return numbers(priors(log)[-1])


async def test_who_has_rated_nothing_begins_with_what_the_others_say(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD))
    gateway = Gateway(log, tmp_path)
    await gateway.dials.follow()
    assert gateway.leans() == (0.0, 0.0, 0.0)
    assert await gateway.refit()
    (row,) = priors(log)
    assert (row.people, row.number, row.upto, row.at) == (24, 1, len(log.rows) - 1, 1000.0)
    assert not any(user in repr(row) for _, user in CROWD)
    liked, disliked, neither = gateway.leans()
    assert liked > 0.3
    assert disliked < -0.3
    assert abs(neither) < 0.3
    flat = Gateway(log, tmp_path / "flat", CONFIG.model_copy(update={"prior": "flat"}))
    assert not await flat.refit()
    assert flat.leans() == (0.0, 0.0, 0.0)


async def test_a_running_gateway_writes_it_unasked(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD))
    gateway = Gateway(log, tmp_path)
    await gateway.dials.start()
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while gateway.dials.fold is None or gateway.dials.fold.prior_row is None:
            await asyncio.sleep(0.01)
    await gateway.dials.close()
    assert [row.people for row in priors(log)] == [24]
    assert gateway.leans()[0] > 0.3


async def test_a_prior_is_fitted_once_in_its_time_and_after_a_clock_that_was_wrong(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD))
    gateway = Gateway(log, tmp_path)
    assert await gateway.refit()
    gateway.now += DAY - 1.0
    assert not await gateway.refit()
    gateway.now += 1.0
    assert await gateway.refit()
    gateway.now -= 40 * DAY  # the row is of a clock that ran ahead
    assert await gateway.refit()
    assert [row.number for row in priors(log)] == [1, 2, 3]


async def test_too_few_people_give_none_and_a_known_one_ends_when_they_become_too_few(tmp_path: Path) -> None:
    rows = rated(CROWD[:20])
    log = await log_with(rows[: len(rows) // 5 - 2])  # 19 people
    gateway = Gateway(log, tmp_path)
    assert not await gateway.refit()
    await log.append(*rows)
    assert await gateway.refit()
    assert gateway.leans() != (0.0, 0.0, 0.0)
    await log.append(ConsentGiven(id="c", tenant="acme", user="user 3", level=Consent.AGGREGATE, at=50.0))
    gateway.now += DAY
    assert await gateway.refit()
    assert priors(log)[-1].people == 0
    assert gateway.leans() == (0.0, 0.0, 0.0)


def _of_lower_consent(rows: list[Row]) -> list[Row]:
    """One of Ann's answers is for her own dials alone."""
    mine = next(row for row in rows if isinstance(row, Turn) and row.person == ANN)
    return [replace(row, consent=Consent.ADAPT) if row is mine else row for row in rows]


def _chose(level: Consent, *, before: bool = False) -> Callable[[list[Row]], list[Row]]:
    choice = ConsentGiven(id="c", tenant="acme", user=ANN[1], level=level, at=50.0)
    return lambda rows: [choice, *rows] if before else [*rows, choice]


def _retracted(rows: list[Row]) -> list[Row]:
    said = [row for row in rows if isinstance(row, Signal) and row.turn.startswith("acme user 3 ")]
    return [*rows, *(replace(row, id=f"r{row.id}", retracts=row.id) for row in said)]


def _greedy(rows: list[Row]) -> list[Row]:
    greedy = Sampling(max_tokens=9, temperature=0.0)
    return [replace(row, sampling=greedy) if isinstance(row, Turn) and row.person == ANN else row for row in rows]


@pytest.mark.parametrize(
    "change",
    [
        _of_lower_consent,
        _chose(Consent.ADAPT),
        _chose(Consent.AGGREGATE),
        _chose(Consent.NEVER),
        _chose(Consent.ADAPT, before=True),
        _retracted,
        _greedy,
    ],
    ids=[
        "an answer for her alone",
        "chose adapt",
        "aggregate",
        "never",
        "adapt before",
        "retracted all",
        "untrainable",
    ],
)
async def test_who_does_not_agree_is_not_in_it_to_the_bit(
    tmp_path: Path, change: Callable[[list[Row]], list[Row]]
) -> None:
    rows = rated(CROWD)
    everybody = await fit_of(rows, tmp_path / "all")
    others = await fit_of(without(rows, {ANN}), tmp_path / "others")
    assert everybody.people == others.people + 1
    assert everybody.mean != others.mean
    assert await fit_of(change(rows), tmp_path / "changed") == others


async def test_a_forgotten_person_is_out_of_the_next_prior_to_the_bit(tmp_path: Path) -> None:
    rows, ring = rated(CROWD), KeyRing(tmp_path / "keys.db", None, lambda: 9.0)
    ring.numbers([Scope(tenant, user=user) for tenant, user in CROWD])
    log = await log_with(rows)
    gateway = Gateway(log, tmp_path, ring=ring)
    assert await gateway.refit()
    elsewhere = KeyRing(tmp_path / "keys.db", None, lambda: 9.0)  # another process, and no word to the gateway
    elsewhere.forget(ANN[0], [Scope(ANN[0], user=ANN[1])])
    gateway.now += DAY
    assert await gateway.refit()
    with_all, after = priors(log)
    assert numbers(after) == await fit_of(without(rows, {ANN}), tmp_path / "others") != numbers(with_all)


async def test_the_log_on_disk_gives_the_same_prior_before_and_after_its_cache_is_lost(tmp_path: Path) -> None:
    rows = rated(CROWD)
    with SqlLog.open(tmp_path / "log", lambda: 9.0, RecordConfig(encrypt=Encrypt.USER)) as log:
        await log.append(SteeringBasis.of(BASIS, at=1.0), *rows)
        assert log.keys is not None
        one = Gateway(log, tmp_path / "one", ring=log.keys)
        assert await one.refit()
        await log.forget(*ANN)
        one.now += DAY
        assert await one.refit()
        two = Gateway(log, tmp_path / "two", ring=log.keys)  # reads the redacted turns
        two.now += 2 * DAY
        assert await two.refit()
        found = [row async for _, row in log.read(0, {DialPrior})]
    assert [row.number for row in found if isinstance(row, DialPrior)] == [1, 2, 3]
    expected = await fit_of(without(rows, {ANN}), tmp_path / "memory")
    assert [numbers(row) == expected for row in found if isinstance(row, DialPrior)] == [False, True, True]


async def test_gateways_that_fit_at_once_read_the_same_prior_and_lean_alike(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD))
    one, two = Gateway(log, tmp_path / "one"), Gateway(log, tmp_path / "two")
    await one.dials.follow()
    await two.dials.follow()
    two.now += 5.0
    assert await one.dials.refit()
    assert await two.dials.refit(), "it has not read the other's"
    assert [(row.number, row.at) for row in priors(log)] == [(1, 1000.0)]
    await log.append(*rated([BOB], (0.0, 1.0, 0.0), 8)[-3:])
    restarted = Gateway(log, tmp_path / "two")  # from what was saved at the fit
    lost = Gateway(log, tmp_path / "lost")
    for each in (one, two, restarted, lost):
        await each.dials.follow()
    for person in (NEW, ANN, BOB):
        assert len({each.leans(person) for each in (one, two, restarted, lost)}) == 1
    assert one.leans(BOB) != one.leans(ANN) != one.leans(NEW)


async def test_a_prior_changes_nobodys_state(tmp_path: Path) -> None:
    """Nor what a person who rejects everything has missed so far, which decides when they return to the prior."""
    crowd, contrary = rated(CROWD), rated([("acme", "contrary")], (0.0, 0.0, 0.0), 12)
    log, plain = await log_with(crowd), await log_with([*crowd, *contrary])
    gateway, other = Gateway(log, tmp_path / "one"), Gateway(plain, tmp_path / "two")
    assert await gateway.refit()
    await log.append(*contrary)
    await gateway.dials.follow()
    await other.dials.follow()
    for person in (ANN, ("acme", "contrary")):
        states = [each.dials.fold.state(person) for each in (gateway, other) if each.dials.fold is not None]
        packed = [replace(state, cursor=0).pack() for state in states if state is not None]
        missed = [state.latest.cusum for state in states if state is not None and state.latest is not None]
        assert len(packed) == len(missed) == 2
        assert packed[0] == packed[1]
        assert missed[0] == missed[1]
    assert missed[0] > 1.0
    assert gateway.leans(("acme", "contrary")) != other.leans(("acme", "contrary"))


OWN = CONFIG.model_copy(update={"tenants": {"bolt": TenantAdaptConfig(prior="own")}})


async def test_an_organisation_of_its_own_begins_at_its_level_and_tells_the_others_nothing(tmp_path: Path) -> None:
    crowd, own = rated(CROWD), rated(OTHERS, (-1.0, 0.0, 1.0))
    alone = await fit_of(crowd, tmp_path / "alone", OWN)
    log = await log_with([*own, *crowd])
    gateway = Gateway(log, tmp_path / "both", OWN)
    assert await gateway.refit()
    (row,) = priors(log)
    assert replace(numbers(row), organisations={}) == alone
    assert [*row.organisations] == ["bolt"]
    assert row.organisations["bolt"][0] == 24
    assert gateway.leans()[0] > 0.3
    assert gateway.leans(("bolt", "nobody yet"))[0] < 0.0 < gateway.leans(("bolt", "nobody yet"))[2]
    assert gateway.leans(("other", "nobody yet")) == gateway.leans()
    shared = Gateway(log, tmp_path / "shared")  # the same row, read by a gateway that has no such setting
    await shared.dials.follow()
    assert shared.leans(("bolt", "nobody yet")) == gateway.leans()


async def test_of_fewer_people_than_five_an_organisation_has_no_level(tmp_path: Path) -> None:
    crowd = rated(CROWD)
    few = await fit_of([*crowd, *rated(OTHERS[:4])], tmp_path / "few", OWN)
    assert few.organisations == {}
    assert (await fit_of([*crowd, *rated(OTHERS[:5])], tmp_path / "five", OWN)).organisations["bolt"][0] == 5


async def test_a_tenant_that_allows_less_feeds_no_prior(tmp_path: Path) -> None:
    rows = [*rated(CROWD), *rated(OTHERS, (-1.0, 0.0, 1.0))]
    alone = await fit_of(rated(CROWD), tmp_path / "alone")
    consent = {"acme": Consent.YES, "bolt": Consent.ADAPT}.__getitem__
    for name, config in (("shared", CONFIG), ("own", OWN)):
        log = await log_with(rows)
        gateway = Gateway(log, tmp_path / name, config, consent=consent)
        assert await gateway.refit()
        assert numbers(priors(log)[-1]) == alone
    off = CONFIG.model_copy(update={"tenants": {"bolt": TenantAdaptConfig(prior="off")}})
    assert await fit_of(rows, tmp_path / "off", off) == alone


async def test_a_full_disk_delays_a_prior_and_nothing_else(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD))
    gateway = Gateway(log, tmp_path)
    await gateway.dials.follow()
    log.full = True
    with pytest.raises(StorageFull):
        await gateway.dials.refit()
    assert gateway.leans() == (0.0, 0.0, 0.0)
    log.full = False
    assert await gateway.refit()


async def test_a_damaged_prior_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = await log_with(rated(CROWD))
    gateway = Gateway(log, tmp_path)
    assert await gateway.refit()
    before = gateway.leans()
    (row,) = priors(log)
    await log.append(replace(row, number=7, within=row.within[:-1]), replace(row, number=9, names="0" * 32, mean=()))
    await gateway.dials.follow()
    assert gateway.leans() == before
    assert "prior 7 is not of 3 dials" in caplog.text
