"""A whole cycle: by hand where one region and one machine make it possible, and what a description must not be."""

import pytest

from ostinato.compute.plan import Delivery, Description, plan_cycle, training_work
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.plan import deliveries

SMALL = {
    "model": {
        "parameters": 1e6, "active": 1e6, "layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_size": 1, "experts": 0,
    },
    "turns": {"tokens": 1000, "hours": 1, "prompt": 6, "answer": 4, "cached": 0.5, "served": 3, "peak": 2},
    "training": {"hardware": "card", "machines": 1, "steps": 2, "recomputed": 1, "references": 0.5},
    "evaluation": {"hardware": "card", "candidates": 1, "items": 5, "draws": 2, "versions": 1},
    "regions": {"here": {"hardware": "card", "machines": 2, "replica": 1, "batch": 1000, "chunk": 1000}},
    "hardware": {
        "card": {"accelerators": 1, "flops": 1e9, "memory": 1e9, "memory_rate": 1e30, "network": 1e9, "load_rate": 1e6, "price": 7}
    },
    "reached": {"prefill": 1, "decode": 0.5, "train": 0.1, "memory_rate": 1},
    "publication": {"egress_per_gb": 3, "relay_gbit": 8e-3},
}  # fmt: skip
SENT = Delivery(bytes=1e6, encode_s=3.0, upload_s=4.0, regions={"here": (5.0, 6.0)})


def description(**parts) -> Description:
    return Description.model_validate({**SMALL, **{name: {**SMALL[name], **part} for name, part in parts.items()}})


def lane(found, name):
    return next(lane for lane in found.lanes if lane.name == name)


def phases(found, name):
    return {phase.name: phase for phase in lane(found, name).phases}


def test_serving_by_hand():
    found = phases(plan_cycle(description(), SENT), "serve here")
    turns = 1000 / 10 * 3
    new, pairs = 3, 4 + 5 + 6
    flops = turns * (new * 2e6 + pairs * 4)
    assert found["prefill"].flops == pytest.approx(flops)
    assert found["prefill"].seconds == pytest.approx(flops / 1e9 / 2)
    assert found["prefill"].money == pytest.approx(flops / 1e9 / 3600 * 7)
    flops = turns * (4 * 2e6 + (7 + 8 + 9 + 10) * 4)
    assert found["decode"].seconds == pytest.approx(flops / 0.5e9 / 2)


def test_training_by_hand():
    found = phases(plan_cycle(description(), SENT), "train")
    forward = 100 * (7 * 2e6 + sum(range(4, 11)) * 4)
    assert found["forward"].flops == pytest.approx(forward)
    assert found["backward"].flops == pytest.approx(3 * forward)
    assert found["reference"].flops == pytest.approx(forward / 2)
    assert found["forward"].seconds == pytest.approx(forward / 1e8)
    assert found["optimizer"].bytes == 30 * 1e6 * 2


def test_a_version_on_its_way_by_hand():
    found = plan_cycle(description(), SENT)
    assert [phase.seconds for phase in phases(found, "publish").values()] == [6.0, 8.0]
    follow = phases(found, "follow here")
    assert follow["fetch"].seconds == 10.0
    assert follow["fetch"].money == pytest.approx(2 * 1e-3 * 3)
    assert follow["to each replica"].bytes == 2 * 2 * 1e6
    assert follow["to each replica"].seconds == pytest.approx(2 * 2 * 1e6 / 1e6)
    assert follow["decode, verify"].seconds == 12.0
    assert follow["swap"].seconds == pytest.approx(2 * 2e6 / 1e6)
    assert found.lag["here"] == pytest.approx(3 + 4 + 5 + 2 + 6 + 2)


def test_idle_machines_are_paid_for():
    found = plan_cycle(description(), SENT)
    train = lane(found, "train")
    busy = sum(phase.seconds for phase in train.phases)
    assert train.load == pytest.approx(busy / 3600)
    assert train.idle == pytest.approx((3600 - busy) / 3600 * 7)
    assert lane(found, "serve here").load == pytest.approx(
        2 * sum(p.seconds for p in lane(found, "serve here").phases) / 3600
    )
    rest = found.money - sum(each.idle for each in found.lanes)
    assert rest == pytest.approx(sum(phase.money for each in found.lanes for phase in each.phases))


def test_the_bottleneck_is_the_fullest_lane_whose_machines_are_not_open():
    slow = Delivery(bytes=1.0, encode_s=1.0, upload_s=1500.0, regions={"here": (5.0, 6.0)})
    assert plan_cycle(description(), slow).bottleneck.name == "publish"
    open_ended = description(
        turns={"tokens": 1e6}, training={"machines": 0}, regions={"here": {**SMALL["regions"]["here"], "machines": 0}}
    )
    found = plan_cycle(open_ended, SENT)
    assert lane(found, "train").open
    assert found.bottleneck.name not in ("train", "serve here")


def test_open_machines_are_the_fewest_that_keep_up():
    told = description(turns={"tokens": 1e6}, training={"machines": 0})
    found = lane(plan_cycle(told, SENT), "train")
    assert found.machines > 1
    assert found.load <= told.reached.busy
    fewer = description(turns={"tokens": 1e6}, training={"machines": found.machines - 1})
    assert lane(plan_cycle(fewer, SENT), "train").load > told.reached.busy


def test_published_hours_of_a_large_training_come_out():
    """Llama 3.1 405B: 15.6e12 tokens took 30.84e6 H100 hours (its model card). Nothing of it went into the shares; sequences of 8,192."""
    told = Description.model_validate(
        {
            "model": {
                "parameters": 405e9, "active": 405e9, "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "head_size": 128,
                "experts": 0,
            },
            "turns": {"tokens": 15.6e12, "prompt": 8191, "answer": 1, "cached": 0},
            "training": {"recomputed": 0, "references": 0},
        }
    )  # fmt: skip
    flops = sum(need.flops for _, need in training_work(told))
    hours = flops / (told.hardware["h200"].flops * told.reached.train) / 3600
    assert hours == pytest.approx(30.84e6, rel=0.1)


def test_the_default_fits_and_takes_its_bytes_from_the_weight_stores_plan():
    told = Description()
    sent = deliveries(told)
    found = plan_cycle(told, sent)
    assert all(each.load < 1 for each in found.lanes)
    assert phases(found, "publish")["upload"].bytes == sent.bytes * 10
    assert len(found.lag) == 4
    assert sent.bytes == pytest.approx(1.04e12 * 0.02 * 7.07 / 8, rel=0.01)  # H(0.02)/0.02 = 7.07 bits a change


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"evaluation": {"hardware": "none"}}, "evaluation.hardware"),
        ({"regions": {"here": {**SMALL["regions"]["here"], "hardware": "none"}}}, "regions.here.hardware"),
        ({"regions": {"here": {**SMALL["regions"]["here"], "replica": 2, "machines": 3}}}, "regions.here.machines"),
        (
            {"hardware": {"card": {**SMALL["hardware"]["card"], "memory": 1e6}}},
            "regions.here.replica: 1 .* it takes at least 3",
        ),
        (
            {
                "hardware": {**SMALL["hardware"], "tiny": {**SMALL["hardware"]["card"], "memory": 1e6}},
                "evaluation": {**SMALL["evaluation"], "hardware": "tiny"},
            },
            "evaluation.hardware: 1 .* it takes at least 3",
        ),
        (
            {"hardware": {"card": {**SMALL["hardware"]["card"], "memory": 4e6}}},
            "training.machines: 1 .* set 5 or more",
        ),
    ],
)
def test_what_does_not_fit_is_named(parts, names):
    with pytest.raises(BadConfig, match=names):
        plan_cycle(description(**parts), SENT)


def test_too_few_shards_are_named():
    with pytest.raises(BadConfig, match=r"publication.shards: .* 8 do"):
        deliveries(Description.model_validate({"publication": {"shards": 1}}))
