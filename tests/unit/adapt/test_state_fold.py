"""Everybody's states as a fold of the log: what is taken in, and that nothing but the log decides their bits."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.adapt.people import (
    BASIS,
    RULES,
    about,
    cache_at,
    folded,
    log_of,
    packed,
    set_dials,
    steered_turn,
    traffic,
)

from ostinato.adapt.prior import flat_prior
from ostinato.adapt.state_fold import StateFold, StateRules
from ostinato.core.errors import StorageFull
from ostinato.core.records import Consent, ConsentGiven, Row, Sampling, SteeringBasis
from ostinato.core.steering import Basis
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.keys import KeyRing, Scope
from ostinato.record.log import SqlLog
from ostinato.testing.log import MemoryLog

ANN = ("acme", "ann")


async def test_a_rating_changes_its_persons_state_alone(tmp_path: Path) -> None:
    turns = [steered_turn(f"t{k}:0", ANN, 10.0 + k) for k in range(6)]
    other = steered_turn("o:0", ("bolt", "ann"), 30.0)
    fold = await folded(
        await log_of([*turns, other, *(about(turn, f"s{k}") for k, turn in enumerate(turns))]), cache_at(tmp_path)
    )
    state = fold.state(ANN)
    assert state is not None
    assert state.evidence(RULES.prior, RULES.regression).ratings == 6
    assert state.recent[0].features_K.tolist() == pytest.approx(turns[0].steered.features, abs=1e-2)
    assert fold.state(("bolt", "ann")) is None


async def test_only_what_the_rules_name_of_the_own_tenant_counts(tmp_path: Path) -> None:
    turn, plain = steered_turn("t:0", ANN, 10.0), replace(steered_turn("p:0", ANN, 11.0), steered=None)
    odd = steered_turn("odd:0", ANN, 12.0, basis=replace(BASIS, weights="of no row"))
    counted = replace(steered_turn("c:0", ANN, 13.0), consent=Consent.AGGREGATE)
    told = [
        about(turn, "1", "opened"),
        replace(about(turn, "2"), tenant="bolt"),
        about(plain, "3"),
        about(odd, "4"),
        about(counted, "5"),
    ]
    assert (
        packed(await folded(await log_of([turn, plain, odd, counted, *told]), cache_at(tmp_path / "a")), [turn]) == {}
    )
    rows: list[Row] = [turn, about(turn, "1", "undone"), about(turn, "2", value=0.0)]
    state = (await folded(await log_of(rows), cache_at(tmp_path / "b"))).state(ANN)
    assert state is not None
    assert [rated.reward for rated in state.recent] == [0.0]
    without = replace(RULES, without=frozenset({"acme"}))
    assert packed(await folded(await log_of(rows), cache_at(tmp_path / "c"), without), rows) == {}


async def test_an_answer_under_another_basis_tells_of_the_dials_that_both_have(tmp_path: Path) -> None:
    names = ("you", "commas", "brief")  # as many, of which two are the same, in another order
    other = Basis(names=names, tokens_M=BASIS.tokens_M, directions_KM=BASIS.directions_KM, weights="1" * 64)
    alien = Basis(names=("a", "b", "c"), tokens_M=BASIS.tokens_M, directions_KM=BASIS.directions_KM, weights="2" * 64)
    turns = [steered_turn("o:0", ANN, 10.0, basis=other), steered_turn("a:0", ANN, 11.0, basis=alien)]
    bases = [SteeringBasis.of(basis, at=2.0) for basis in (other, alien)]
    log, cache = await log_of([*bases, *turns]), cache_at(tmp_path)
    await (await folded(log, cache)).save()
    await log.append(*(about(turn, turn.id) for turn in turns))
    state = (await folded(log, cache)).state(ANN)  # goes on from what was saved, the bases' names included
    assert state is not None
    you, _, brief = turns[0].steered.features
    assert [rated.features_K.tolist() for rated in state.recent] == [pytest.approx([brief, 0.0, you], abs=1e-2)]


async def test_early_late_and_retracted_signals_leave_what_their_set_says(tmp_path: Path) -> None:
    one, two = steered_turn("one:0", ANN, 10.0), steered_turn("two:0", ANN, 20.0)
    accepted, undone, other = about(one, "a"), about(one, "u", "undone"), about(two, "b", value=0.0)
    gone = about(one, "r", retracts="u")
    orders: list[list[Row]] = [
        [one, two, accepted, undone, gone, other],
        [gone, undone, accepted, one, other, two],
        [one, gone, two, other, undone, accepted],
        [undone, one, two, other, accepted, gone],
    ]
    found = []
    for number, rows in enumerate(orders):
        state = (await folded(await log_of(rows), cache_at(tmp_path / str(number)))).state(ANN)
        assert state is not None
        found.append([(rated.place, rated.reward) for rated in state.recent])
    assert [reward for _, reward in found[0]] == [1.0, 0.0]
    assert found == [found[0]] * len(orders)


async def test_two_gateways_that_read_at_other_times_have_the_same_bits(tmp_path: Path) -> None:
    rows = traffic(6, 300)
    whole = await folded(await log_of(rows), cache_at(tmp_path / "whole"))
    log, cache = MemoryLog(), cache_at(tmp_path / "piecewise")
    fold = StateFold(log, cache, RULES)
    await fold.start()
    for number, row in enumerate(rows):
        await log.append(row)
        if number % 5 == 0:
            await fold.catch_up()
        if number % 37 == 0:
            await fold.save()
        if number % 90 == 0:  # another process goes on from what was saved
            fold = StateFold(log, cache, RULES)
            await fold.start()
    await fold.catch_up()
    assert len(packed(whole, rows)) >= 10
    assert packed(fold, rows) == packed(whole, rows)


async def test_a_lost_or_foreign_cache_is_folded_anew_to_the_same_bits(tmp_path: Path) -> None:
    rows = traffic(6, 200)
    log = await log_of(rows)
    cache = cache_at(tmp_path)
    fold = await folded(log, cache)
    await fold.save()
    expected = packed(fold, rows)
    place = tmp_path / "folds" / "people.sqlite"
    for damage in (
        lambda: place.write_bytes(b"no database" * 200),
        place.unlink,
        lambda: place.with_suffix(".key").write_text("cut off"),
    ):
        cache.close()
        damage()
        cache = cache_at(tmp_path)
        again = await folded(log, cache)
        assert packed(again, rows) == expected
        await again.save()
    shorter = rows[:150]  # restored from an older backup
    assert packed(await folded(await log_of(shorter), cache_at(tmp_path)), rows) == packed(
        await folded(await log_of(shorter), cache_at(tmp_path / "fresh")), rows
    )
    other = replace(RULES, signals={"accepted": 0.9})
    assert other.hash != RULES.hash
    assert packed(await folded(log, cache_at(tmp_path), other), rows) != expected


async def test_a_forgotten_person_has_no_state_at_once_and_no_row_after_the_next_save(tmp_path: Path) -> None:
    ring, elsewhere = (KeyRing(tmp_path / "keys.db", None, lambda: 9.0) for _ in range(2))
    bob = ("acme", "bob")
    ring.numbers([Scope("acme", user="ann"), Scope("acme", user="bob")])
    turns = [steered_turn("a:0", ANN, 10.0), steered_turn("b:0", bob, 11.0)]
    log, cache = await log_of([*turns, *(about(turn, turn.id) for turn in turns)]), cache_at(tmp_path, ring)
    fold = await folded(log, cache)
    await fold.save()
    assert cache.count("acme") == 2
    assert all(b"ann" not in path.read_bytes() for path in (tmp_path / "folds").iterdir())
    before = fold.state(bob)
    elsewhere.forget("acme", [Scope("acme", user="ann")])  # another process
    assert fold.state(ANN) is None
    assert cache.load(ANN) is None
    assert fold.state(bob) is before
    await log.append(about(turns[0], "late"))  # their features are in memory still
    await fold.catch_up()
    assert fold.state(ANN) is None
    await fold.save()
    assert cache.count("acme") == 1
    assert (await folded(log, cache_at(tmp_path, ring))).state(ANN) is None


async def test_what_waits_to_be_saved_when_the_key_goes_is_not_written(tmp_path: Path) -> None:
    ring, elsewhere = (KeyRing(tmp_path / "keys.db", None, lambda: 9.0) for _ in range(2))
    ring.numbers([Scope("acme", user="ann"), Scope("acme", user="bob")])
    turns = [steered_turn("a:0", ANN, 10.0), steered_turn("b:0", ("acme", "bob"), 11.0)]
    log, cache = await log_of([*turns, *(about(turn, turn.id) for turn in turns)]), cache_at(tmp_path, ring)
    fold = await folded(log, cache)
    await fold.save()
    await log.append(*(about(turn, f"again {turn.id}") for turn in turns))
    await fold.catch_up()
    elsewhere.forget("acme", [Scope("acme", user="ann")])
    await fold.save()
    assert cache.count("acme") == 1


async def test_who_comes_back_after_being_forgotten_begins_anew(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.db", None, lambda: 9.0)
    ring.numbers([Scope("acme", user="ann")])
    old, new = steered_turn("a:0", ANN, 10.0), steered_turn("b:0", ANN, 20.0)
    log = await log_of([old, about(old, "s")])
    fold = await folded(log, cache_at(tmp_path, ring))
    ring.forget("acme", None)
    assert fold.state(ANN) is None
    ring.numbers([Scope("acme", user="ann")])
    assert fold.state(ANN) is None
    await log.append(new, about(new, "t"), about(old, "late", "undone"))
    await fold.catch_up()
    state = fold.state(ANN)
    assert state is not None
    assert [rated.reward for rated in state.recent] == [1.0]
    await fold.save()
    assert (await folded(log, cache_at(tmp_path, ring))).state(ANN) is not None


async def test_a_tenant_has_so_many_people_and_those_longest_unrated_go_first(tmp_path: Path) -> None:
    people = [("acme", f"user {k}") for k in range(6)]
    turns = [steered_turn(f"t{k}:0", person, 10.0 + k) for k, person in enumerate(people)]
    other = steered_turn("o:0", ("bolt", "zoe"), 9.0)
    rows = [
        *turns,
        other,
        about(other, "o"),
        *(about(turn, turn.id) for turn in turns),
        about(turns[0], "again", "undone"),
    ]
    cache = cache_at(tmp_path, most=3)
    fold = await folded(await log_of(rows), cache)
    await fold.save()
    assert cache.count("acme") == 3
    assert [cache.load(person) is not None for person in people] == [True, False, False, False, True, True]
    assert cache.load(("bolt", "zoe")) is not None


async def test_a_full_disk_loses_nothing_and_bounds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = traffic(6, 120)
    log, cache = await log_of(rows), cache_at(tmp_path)
    expected = packed(await folded(log, cache_at(tmp_path / "other")), rows)
    write, full = cache.write, True

    def refuse(*told: object) -> None:
        if full:
            raise StorageFull("the disk is full; free space")
        write(*told)

    monkeypatch.setattr(cache, "write", refuse)
    monkeypatch.setattr("ostinato.adapt.state_fold._UNSAVED", 4)
    fold = StateFold(log, cache, RULES)
    await fold.start()
    with pytest.raises(StorageFull):
        await fold.catch_up()
    assert len(fold._dirty) == 4
    full = False
    await fold.catch_up()
    await fold.save()
    assert packed(await folded(log, cache_at(tmp_path)), rows) == packed(fold, rows) == expected


async def test_the_log_on_disk_gives_the_same_bits_and_forgets(tmp_path: Path) -> None:
    """Steering, places and keys as they are stored, and a lost cache."""
    rows = traffic(4, 60)
    log = SqlLog.open(tmp_path / "log", lambda: 9.0, RecordConfig(encrypt=Encrypt.USER))
    for start in range(0, len(rows), 7):
        await log.append(*rows[start : start + 7])
    assert log.keys is not None
    cache = cache_at(tmp_path, log.keys)
    fold = await folded(log, cache)
    await fold.save()
    expected = packed(await folded(await log_of(rows), cache_at(tmp_path / "memory")), rows)
    assert packed(fold, rows) == expected
    gone = min(expected)
    other = SqlLog.open(tmp_path / "log", lambda: 9.0, RecordConfig(encrypt=Encrypt.USER))
    await other.forget(*gone)
    other.close()
    del expected[gone]
    assert packed(fold, rows) == expected
    assert packed(await folded(log, cache_at(tmp_path / "anew", log.keys)), rows) == expected
    log.close()


async def test_who_takes_the_consent_back_has_no_state_and_begins_anew(tmp_path: Path) -> None:
    turns = [steered_turn(f"t{k}:0", ANN, 10.0 + k) for k in range(6)]
    log, cache = await log_of([*turns, *(about(turn, f"s{k}") for k, turn in enumerate(turns))]), cache_at(tmp_path)
    fold = await folded(log, cache)
    assert fold.state(ANN) is not None
    await fold.save()
    choice = ConsentGiven(id="c1", tenant="acme", user="ann", level=Consent.AGGREGATE, at=50.0)
    await log.append(choice, about(turns[0], "late", "undone"))
    await fold.catch_up()
    assert fold.state(ANN) is None
    await fold.save()
    again = await folded(log, cache)  # from the cache, which does not hold the choice
    await log.append(about(turns[1], "later"))
    await again.catch_up()
    assert again.state(ANN) is None
    await log.append(replace(choice, id="c2", level=Consent.ADAPT), about(turns[2], "agreed"))
    await again.catch_up()
    state = again.state(ANN)
    assert state is not None
    assert [rated.place for rated in state.recent] == sorted(rated.place for rated in state.recent)
    assert len(state.recent) == 1, "what was said before does not count"


async def test_who_agreed_again_after_a_refusal_keeps_what_they_have_since_over_a_restart(tmp_path: Path) -> None:
    turn, cache = steered_turn("t:0", ANN, 60.0), cache_at(tmp_path)
    refusal = ConsentGiven(id="c1", tenant="acme", user="ann", level=Consent.NEVER, at=50.0)
    agreed = replace(refusal, id="c2", level=Consent.YES, at=55.0)
    log = await log_of([refusal, agreed, turn, about(turn, "s"), set_dials("1", ANN, 70.0, brief=0.5)])
    fold = await folded(log, cache)
    state = fold.state(ANN)
    assert state is not None
    await fold.save()
    for _ in range(2):
        again = await folded(log, cache)
        found = again.state(ANN)
        assert found is not None
        assert found.pack() == state.pack()
        other = steered_turn("o:0", ("acme", "bob"), 80.0)
        await log.append(other, about(other, f"of bob {_}"))
        await again.catch_up()
        await again.save()


def held(fold: StateFold, person: tuple[str, str] = ANN) -> dict[int, float]:
    state = fold.state(person)
    assert state is not None
    return dict(state.held)


async def test_dials_that_a_person_sets_count_in_the_logs_order_for_them_alone(tmp_path: Path) -> None:
    bolt = ("bolt", "ann")
    rows: list[Row] = [
        set_dials("1", ANN, 10.0, brief=0.5, lists=-1.0),
        set_dials("2", bolt, 10.0, you=2.0),
        set_dials("3", ANN, 9.0, lists=0.25, of_another_basis=1.0),  # later in the log, by a slower clock
    ]
    log = await log_of(rows)
    fold = await folded(log, cache_at(tmp_path))
    assert held(fold) == {0: 0.5, 1: 0.25}
    assert held(fold, bolt) == {2: 2.0}
    await fold.save()
    await log.append(set_dials("4", ANN, 11.0, brief=None), set_dials("5", ("acme", "bob"), 12.0, unknown=1.0))
    again = await folded(log, cache_at(tmp_path))
    assert held(again) == {1: 0.25}
    assert again.state(("acme", "bob")) is None, "nothing that is known was set"
    await log.append(set_dials("6", ANN, 13.0), replace(set_dials("7", bolt, 13.0), dials=None))
    await again.catch_up()
    assert (held(again), held(again, bolt)) == ({}, {2: 2.0})


async def test_nothing_said_of_answers_before_a_return_to_the_prior_counts_after_it(tmp_path: Path) -> None:
    turns = [steered_turn(f"t{k}:0", ANN, 10.0 + k) for k in range(5)]
    rated, late, after = turns[:3], turns[3:5], steered_turn("after:0", ANN, 20.0)
    for far in (0.0, 1e9):  # the clock of the gateway that took it is behind, or far ahead
        rows: list[Row] = [*rated, *late, *(about(turn, turn.id) for turn in rated)]
        log = await log_of([*rows, set_dials("d", ANN, 14.5 + far), *(about(turn, turn.id) for turn in late)])
        fold = await folded(log, cache_at(tmp_path / str(far)))
        state = fold.state(ANN)
        assert state is not None
        assert state.evidence(RULES.prior, RULES.regression).ratings == 0
        assert state.settled.reset_at == state.settled_at > 0
        await log.append(after, about(after, "new"), *(about(turn, f"again {turn.id}", "undone") for turn in turns))
        await fold.catch_up()
        state = fold.state(ANN)
        assert state is not None
        assert [each.reward for each in state.recent] == [1.0]


async def test_what_no_gateway_would_take_bends_nothing(tmp_path: Path) -> None:
    rows: list[Row] = [
        set_dials("1", ANN, 1.0, brief=1e9, lists=float("inf"), you=float("-inf")),
        set_dials("2", ANN, float("-inf"), you=None),
        replace(set_dials("3", ANN, float("inf"), lists=1.0), user="bob"),
        set_dials("4", ("acme", "zoe"), float("-inf")),
    ]
    fold = await folded(await log_of(rows), cache_at(tmp_path))
    assert held(fold) == {0: 3.0}
    await fold.save()
    assert held(await folded(await log_of(rows), cache_at(tmp_path))) == {0: 3.0}


async def test_who_allows_no_dials_sets_none_and_what_was_set_is_gone(tmp_path: Path) -> None:
    refused = ConsentGiven(id="c1", tenant="acme", user="ann", level=Consent.NEVER, at=50.0)
    log = await log_of([set_dials("1", ANN, 1.0, brief=1.0), refused, set_dials("2", ANN, 60.0, lists=1.0)])
    fold = await folded(log, cache_at(tmp_path))
    assert fold.state(ANN) is None
    await log.append(replace(refused, id="c2", level=Consent.ADAPT), set_dials("3", ANN, 61.0, you=1.0))
    await fold.catch_up()
    assert held(fold) == {2: 1.0}
    without = replace(RULES, without=frozenset({"acme"}))
    assert (await folded(log, cache_at(tmp_path / "without"), without)).state(ANN) is None


async def test_set_dials_go_with_their_persons_key_on_disk(tmp_path: Path) -> None:
    log = SqlLog.open(tmp_path / "log", lambda: 9.0, RecordConfig(encrypt=Encrypt.USER))
    await log.append(SteeringBasis.of(BASIS, at=1.0), set_dials("1", ANN, 1.0, brief=1.0))
    cache = cache_at(tmp_path, log.keys)
    fold = await folded(log, cache)
    await fold.save()
    assert (held(fold), cache.count("acme")) == ({0: 1.0}, 1)
    await log.forget(*ANN)
    assert fold.state(ANN) is None
    await fold.save()
    assert cache.count("acme") == 0
    assert (await folded(log, cache_at(tmp_path / "anew", log.keys))).state(ANN) is None
    log.close()


async def test_returns_to_the_prior_by_themselves_are_counted_and_survive_a_restart(tmp_path: Path) -> None:
    turns = [steered_turn(f"t{k}:0", ANN, 10.0 + k) for k in range(60)]
    strict = replace(RULES, regression=replace(RULES.regression, drift=0.0, limit=1.0))
    log = await log_of([row for turn in turns for row in (turn, about(turn, turn.id, value=float(turn.id < "t3")))])
    fold = await folded(log, cache_at(tmp_path), strict)
    state = fold.state(ANN)
    assert state is not None
    assert fold.resets == state.evidence(RULES.prior, strict.regression).resets > 0
    await fold.save()
    assert (await folded(log, cache_at(tmp_path), strict)).resets == fold.resets


async def test_answers_that_were_not_drawn_from_the_steered_distribution_itself_teach_nothing(tmp_path: Path) -> None:
    turns = [
        replace(steered_turn(f"t{k}:0", ANN, 10.0 + k), sampling=sampling)
        for k, sampling in enumerate((Sampling(max_tokens=9, temperature=0.0), Sampling(max_tokens=9, top_p=0.9)))
    ]
    fold = await folded(
        await log_of([*turns, *(about(turn, f"s{k}") for k, turn in enumerate(turns))]), cache_at(tmp_path)
    )
    assert fold.state(ANN) is None


def test_rules_that_give_other_states_have_another_hash() -> None:
    assert isinstance(RULES, StateRules)
    changed = (
        replace(RULES, names=("brief", "lists", "we")),
        replace(RULES, without=frozenset({"acme"})),
        replace(RULES, regression=replace(RULES.regression, decay=0.98)),
        replace(RULES, prior=flat_prior(3, variance=0.01)),
    )
    assert len({RULES.hash, *(rules.hash for rules in changed)}) == 5
    assert replace(RULES, signals=dict(reversed(RULES.signals.items()))).hash == RULES.hash


async def test_states_that_could_not_be_written_are_written_later_whatever_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, cache = steered_turn("t:0", ANN, 10.0), cache_at(tmp_path)
    fold = await folded(await log_of([turn, about(turn, "s")]), cache)

    def fails(*_: object) -> None:
        raise RuntimeError("a fault of the program")

    with monkeypatch.context() as patched:
        patched.setattr(cache, "write", fails)
        with pytest.raises(RuntimeError):
            await fold.save()
    assert cache.count("acme") == 0
    await fold.save()
    assert cache.count("acme") == 1
