"""What a round draws, and what a suite of its size can resolve."""

import pytest

from ostinato.core.errors import BadConfig
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.gate import (
    check_bars,
    check_margins,
    items_for,
    items_in_round,
    sealed_ids,
    seed_of,
    select,
    smallest_total_margin,
)
from ostinato.evaluate.runner import item_seed
from ostinato.evaluate.suites import Item, Suite


def suite(count, name="held-out"):
    return Suite(name, f"{count:064x}", tuple(Item(f"i{n}", "f") for n in range(count)))


SUITE = suite(400)


def test_every_candidate_and_every_round_draws_from_seeds_of_its_own():
    seeds = [seed_of(SUITE, candidate, round) for candidate in ("aa", "bb") for round in range(50)]
    assert len(set(seeds)) == 100
    assert seed_of(SUITE, "aa", 3) == seed_of(SUITE, "aa", 3), "a killed worker draws the same again"
    assert seed_of(suite(399), "aa", 3) not in seeds
    item = SUITE.items[0]
    assert len({item_seed(SUITE, item, 0, seed) for seed in seeds}) == 100


def test_items_rotate_where_a_suite_has_more_than_a_round_takes():
    gate = GateConfig(items_per_round=100, sealed_share=0.0)
    rounds = [select(SUITE, gate, f"c{round}", round) for round in range(40)]
    assert {len(chosen.items) for chosen in rounds} == {100} == {items_in_round(SUITE, gate)}
    used = [item.id for chosen in rounds for item in chosen.items]
    assert len(set(used)) == 400
    assert max(used.count(item.id) for item in SUITE.items) < 25
    assert [item.id for item in rounds[0].items] == [
        item.id for item in SUITE.items if item.id in {chosen.id for chosen in rounds[0].items}
    ]
    assert rounds[0] == select(SUITE, gate, "c0", 0)


def test_sealed_items_stay_sealed_but_for_one_candidate_in_so_many():
    gate = GateConfig(sealed_share=0.1, sealed_every=20)
    sealed = sealed_ids(SUITE, 0.1)
    assert 20 < len(sealed) < 60
    shown = [round for round in range(60) if select(SUITE, gate, "aa", round).sealed]
    assert shown == [19, 39, 59]
    for round in (0, 19):
        ids = {item.id for item in select(SUITE, gate, "aa", round).items}
        assert ids & sealed == (sealed if round == 19 else set())
    assert items_in_round(SUITE, gate) == 400 - len(sealed)


def test_sealing_does_not_depend_on_what_else_a_suite_holds_and_never_takes_all():
    assert sealed_ids(suite(200), 0.1) == {id for id in sealed_ids(SUITE, 0.1) if int(id[1:]) < 200}
    assert sealed_ids(suite(1), 0.5) == frozenset()


OFTEN = GateConfig(candidates_per_week=56)


@pytest.mark.parametrize(
    ("items", "margin"), [(164, 0.077), (500, 0.044), (1000, 0.031), (2000, 0.022), (4000, 0.0157)]
)
def test_the_smallest_total_margin_of_a_suite(items, margin):
    assert smallest_total_margin(items, OFTEN) == pytest.approx(margin, abs=0.0005)
    needed = items_for(margin, OFTEN.total_alpha_at(8), OFTEN)
    assert smallest_total_margin(needed, OFTEN) <= margin
    assert smallest_total_margin(items, GateConfig()) == pytest.approx(0.866 * margin, rel=0.02), "one a day at most"


def test_margins_below_what_the_suite_can_hold_are_refused_with_a_way_out():
    with pytest.raises(BadConfig, match=r"smallest evaluate\.gate\.total_margin that it can hold is 7\.7 pp") as caught:
        check_margins("held-out", 164, OFTEN.model_copy(update={"margin": 0.06}))
    assert "Give it 1089 items" in str(caught.value)
    remedy = str(caught.value).split("total_margin=")[1].split(" ")[0]
    check_margins("held-out", 164, OFTEN.model_copy(update={"margin": 0.06, "total_margin": float(remedy)}))
    with pytest.raises(BadConfig, match=r"evaluate\.gate\.margin that it can hold is 5\.3 pp"):
        check_margins("held-out", 164, OFTEN.model_copy(update={"total_margin": 0.1}))
    check_margins("held-out", 1089, OFTEN)
    with pytest.raises(BadConfig, match=r"evaluate\.gate\.item_spread"):
        check_margins("held-out", 1000, OFTEN.model_copy(update={"draw_spread": 0.5}))


def test_a_bar_that_faultless_answers_cannot_clear_is_refused_with_a_way_out():
    check_bars([(BarConfig(at_least=0.99), "safety", 459)])
    with pytest.raises(BadConfig, match="give it 459 items"):
        check_bars([(BarConfig(at_least=0.99), "safety", 458)])
    with pytest.raises(BadConfig, match="latency of suite 'safety'"):
        check_bars([(BarConfig(axis="latency", at_most=3.0, share=0.99), "safety", 100)])
