"""A log of steered turns and signals about them, and a fold of it, for tests."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ostinato.adapt.learner import Regression
from ostinato.adapt.prior import flat_prior
from ostinato.adapt.state_fold import PlacedLog, StateFold, StateRules
from ostinato.core.records import Person, Row, Signal, SteeringBasis, Turn
from ostinato.core.steering import Basis, DialSet, SetBy, Steered
from ostinato.record.config import Encrypt
from ostinato.record.keys import KeyRing
from ostinato.record.person_cache import SqlPersonCache
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

DIALS = 3
RULES = StateRules(
    names=("brief", "lists", "you"),
    signals={"accepted": 1.0, "undone": 0.0},
    regression=Regression(),
    prior=flat_prior(DIALS),
)


BASIS = Basis(names=RULES.names, tokens_M=np.arange(4), directions_KM=np.ones((DIALS, 4), np.float32), weights="0" * 64)


def steered_turn(id: str, person: Person, at: float, seed: int = 0, *, basis: Basis = BASIS) -> Turn:
    rng = np.random.default_rng([seed, *id.encode()])
    dials = len(basis.names)
    features = tuple(float(value) for value in rng.normal(size=dials).astype(np.float32))
    steered = Steered(basis=basis.hash, dials=(0.0,) * dials, cap=0.1, budget=3.0, kl=0.25, tokens=9, features=features)
    return replace(a_turn(id, user=person[1], ended_at=at), tenant=person[0], steered=steered)


def about(turn: Turn, id: str, name: str = "accepted", value: float = 1.0, *, retracts: str | None = None) -> Signal:
    signal = a_signal(turn, name, at=turn.ended_at + 1.0, id=id, value=value, retracts=retracts)
    return replace(signal, tenant=turn.tenant)


def traffic(people: int, turns: int, seed: int = 0) -> list[Row]:
    """Turns of so many people of two tenants with equal user names; ratings come late, early, twice and are retracted at times."""
    rng, rows, waiting = np.random.default_rng(seed), list[Row]([SteeringBasis.of(BASIS, at=1.0)]), list[Row]()
    for number in range(turns):
        person = ("acme" if number % 2 else "bolt", f"user {rng.integers(people)}")
        turn = steered_turn(f"t{number}:0", person, 100.0 + number, seed)
        signals = [about(turn, f"s{number}", value=float(rng.random() < 0.5))]
        if number % 7 == 0:
            signals.append(about(turn, f"u{number}", "undone"))
        if number % 5 == 0:
            signals.append(about(turn, f"r{number}", retracts=f"s{number}"))
        if number % 11 == 0:
            rng.shuffle(signals)  # a retraction may come first
        early = number % 13 == 0
        rows += [*signals, turn] if early else [turn]
        waiting += [] if early else signals
        if number % 17 == 0:
            chosen: dict[str, float | None] = {"lists": 0.5} if number % 2 else {"you": -1.0, "brief": None}
            rows.append(set_dials(f"d{number}", person, 100.0 + number, **({} if number % 3 == 0 else chosen)))
        while len(waiting) > 6:
            rows.append(waiting.pop(int(rng.integers(3))))
    return [*rows, *waiting]


def set_dials(id: str, person: Person, at: float, **dials: float | None) -> DialSet:
    """Some of a person's dials set by hand, None for the prior; without any, all go back to it."""
    return DialSet(id=id, tenant=person[0], user=person[1], at=at, by=SetBy.PERSON, dials=dials)


async def log_of(rows: list[Row]) -> MemoryLog:
    log = MemoryLog()
    await log.append(SteeringBasis.of(BASIS, at=1.0))
    for row in rows:
        await log.append(row)
    return log


def cache_at(directory: Path, ring: KeyRing | None = None, *, most: int = 1000) -> SqlPersonCache:
    mode = Encrypt.NONE if ring is None else Encrypt.USER
    return SqlPersonCache(directory / "folds" / "people.sqlite", ring, mode, most=most)


async def folded(log: PlacedLog, cache: SqlPersonCache, rules: StateRules = RULES) -> StateFold:
    fold = StateFold(log, cache, rules)
    await fold.start()
    await fold.catch_up()
    return fold


def packed(fold: StateFold, rows: list[Row]) -> dict[Person, bytes]:
    """Everybody's state, to the bit."""
    people = {row.person for row in rows if isinstance(row, Turn)}
    states = {person: fold.state(person) for person in sorted(people)}
    return {person: state.pack() for person, state in states.items() if state is not None}
