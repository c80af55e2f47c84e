"""A plan moves the right way: more work is never cheaper or quicker, more machines never slower, prices are only prices."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.compute.plan import Delivery, Description, plan_cycle

times = st.floats(1.0, 8.0)
TREE = {
    "training": {"machines": 64},
    "turns": {"tokens": 1e10},
    "regions": {"a": {"share": 0.7, "machines": 40, "replica": 8}, "b": {"share": 0.3, "machines": 16, "replica": 8}},
}


def planned(size=1.0, **sections):
    tree = {**TREE, **{name: {**TREE.get(name, {}), **each} for name, each in sections.items()}}
    told = Description.model_validate(tree)
    sent = Delivery(
        bytes=2e10 * size,
        encode_s=10 * size,
        upload_s=15 * size,
        regions={"a": (16.0 * size, 5.0), "b": (20.0 * size, 5.0)},
    )
    return plan_cycle(told, sent)


def seconds(found):
    return [phase.seconds for lane in found.lanes for phase in lane.phases]


def never_less(one, other):
    assert all(a <= b * (1 + 1e-9) for a, b in zip(one, other, strict=True))


@given(factor=times)
def test_more_parameters_never_take_less_time(factor):
    def of(by):
        return planned(model={"parameters": 1.04e12 * by, "active": 32e9 * by})

    never_less(seconds(of(1 + (factor - 1) / 8)), seconds(of(1 + (factor - 1) / 7.9)))


@given(factor=times)
def test_more_tokens_never_take_less_time_or_money(factor):
    less, more = planned(), planned(turns={"tokens": 1e10 * factor})
    never_less(seconds(less), seconds(more))
    assert less.money <= more.money * (1 + 1e-9)


@given(factor=times)
def test_a_larger_version_never_arrives_earlier(factor):
    less, more = planned(), planned(size=factor)
    never_less(seconds(less), seconds(more))
    never_less(less.lag.values(), more.lag.values())
    assert less.money <= more.money


@given(factor=times)
def test_a_price_changes_money_in_proportion_and_nothing_else(factor):
    one, other = (
        planned(hardware={"h200": {"price": 2.5 * by}}, publication={"egress_per_gb": 0.02 * by})
        for by in (1.0, factor)
    )
    assert seconds(one) == seconds(other)
    assert abs(other.money - one.money * factor) <= 1e-9 * other.money


@given(times=st.integers(2, 8))
def test_more_machines_never_slow_what_runs_on_them(times):
    regions = {name: {**each, "machines": each["machines"] * times} for name, each in TREE["regions"].items()}
    few, many = planned(), planned(training={"machines": 64 * times}, regions=regions)
    for one, other in zip(few.lanes, many.lanes, strict=True):
        if one.name.startswith(("serve", "train")):
            assert sum(p.seconds for p in other.phases) <= sum(p.seconds for p in one.phases) / times * (1 + 1e-9)


@given(rate=st.floats(1.0, 16.0), tokens=st.floats(1e9, 1e11))
def test_machines_that_are_open_keep_up(rate, tokens):
    found = planned(
        turns={"tokens": tokens},
        training={"machines": 0},
        regions={name: {**each, "machines": 0} for name, each in TREE["regions"].items()},
        hardware={"h200": {"flops": 989e12 * rate}},
    )
    assert all(lane.load <= 0.8 + 1e-9 for lane in found.lanes if lane.open)
