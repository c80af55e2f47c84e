"""Who is never learned from, how far they and the others part, and who moves a batch."""

import numpy as np
import pytest

from ostinato.core.records import Batch, PolicyVersion
from ostinato.evaluate.statistics import clustered_difference
from ostinato.release.monitors.gap import Influence, InfluenceFold, is_gold, looking, proxy_gap
from ostinato.testing.records import a_turn

V0 = PolicyVersion(number=0, hash="00")


def gold(tenant, user):
    return is_gold(tenant, user, share=0.2, salt="gold")


def people(rng, count, taught, held_back):
    """Tallies of people who accept with these probabilities, by whether they teach."""
    found = {}
    for number in range(count):
        person = ("t", f"u{number}")
        turns = int(rng.integers(1, 30))
        found[person] = (float(rng.binomial(turns, held_back if gold(*person) else taught)), turns)
    return found


def test_gold_is_a_stable_share_that_only_grows_and_tells_tenants_apart():
    names = [f"u{number}" for number in range(5_000)]
    small = {name for name in names if is_gold("t", name, share=0.1, salt="gold")}
    large = {name for name in names if is_gold("t", name, share=0.3, salt="gold")}
    assert abs(len(small) - 500) < 90
    assert small < large
    assert small != {name for name in names if is_gold("other", name, share=0.1, salt="gold")}
    assert small != {name for name in names if is_gold("t", name, share=0.1, salt="another")}
    assert not any(is_gold("t", name, share=0.0, salt="gold") for name in names)


def test_a_tenants_name_does_not_run_into_its_users():
    differs = [
        is_gold(f"a{n}", "b", share=0.5, salt="s") != is_gold("a", f"{n}b", share=0.5, salt="s") for n in range(50)
    ]
    assert any(differs)


def test_the_gap_is_found_where_those_who_teach_are_pleased_more():
    rng = np.random.default_rng(0)
    found = proxy_gap(people(rng, 600, 0.7, 0.5), gold, clustered_difference)
    assert found is not None
    assert 0.1 < found.lower < found.mean < found.upper < 0.3
    assert found.taught_by + found.gold == 600
    assert 90 < found.gold < 150


def test_equal_groups_part_as_seldom_as_the_looks_allow():
    rng = np.random.default_rng(1)
    above = 0
    for _ in range(100):
        found = proxy_gap(people(rng, 300, 0.6, 0.6), gold, clustered_difference, looking(0, 0.1))
        above += found is not None and found.lower > 0.0
    assert above <= 13, "5% of 100 are 5"


def test_looks_share_alpha():
    spent = [(1.0 - looking(look, 0.02)) / 2 for look in range(40)]
    assert spent[0] == pytest.approx(0.01)
    assert sum(spent) <= 0.02 * (1 + 1e-9)


def test_with_few_people_on_a_side_nothing_is_said():
    rng = np.random.default_rng(2)
    assert proxy_gap(people(rng, 60, 0.9, 0.1), gold, clustered_difference) is None
    silent = {("t", f"u{number}"): (0.0, 0) for number in range(1_000)}
    assert proxy_gap(silent, gold, clustered_difference) is None


def batch(step, credits):
    return Batch(step=step, turns=tuple(credits), credits=tuple(credits.values()), reference=V0, at=0.0)


def test_influence_is_the_share_of_absolute_advantage_by_person_and_tenant():
    fold = InfluenceFold()
    for name, user in (("a", "ann"), ("b", "bob"), ("c", "ann")):
        assert fold.apply(a_turn(name, user=user)) is None
    found = fold.apply(batch(4, {"a": (1.0, -1.0), "b": (0.5,), "c": (0.5, 0.0), "gone": (-1.0,)}))
    assert found == Influence(
        step=4, people=((("default", "ann"), 0.625), (("default", "bob"), 0.125)), tenants=(("default", 0.75),), unknown=0.25
    )  # fmt: skip


def test_the_ten_largest_are_named_an_empty_batch_is_nobodys_and_memory_is_bounded():
    fold = InfluenceFold(most=40)
    for number in range(100):
        fold.apply(a_turn(f"t{number}", user=f"u{number}"))
    assert len(fold) == 40
    found = fold.apply(batch(1, {f"t{number}": (float(number),) for number in range(60, 100)}))
    assert found is not None
    assert [person[1] for person, _ in found.people] == [f"u{number}" for number in range(99, 89, -1)]
    assert found.unknown == 0.0
    assert fold.apply(batch(2, {})) == Influence(step=2, people=(), tenants=(), unknown=0.0)
