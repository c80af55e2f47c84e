"""`ostinato plan`: what it prints can be traced to its sources, and what is wrong in a description is named."""

import io
import json

import pytest
from rich.console import Console

from ostinato.core.errors import BadConfig
from ostinato.launch.commands.plan import show_plan


def shown(path=None, overrides=(), *, machine=False):
    out = io.StringIO()
    show_plan(path, overrides, Console(file=out, width=220), machine=machine)
    return out.getvalue()


def test_the_default_is_a_trillion_parameters_and_four_regions():
    text = shown()
    assert all(f"follow {name}" in text for name in ("us-east", "us-west", "europe", "asia"))
    assert "first bottleneck: " in text
    assert "On paper, not a measurement" in text


def test_every_value_says_where_it_comes_from(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text("[turns]\ntokens = 2e9\n[regions.here]\nrtt_ms = 9\n[hardware.h200]\nprice = 3.0\n")
    found = json.loads(shown(file, ["turns.hours=2"], machine=True))
    sources = {each["key"]: (each["value"], each["source"]) for each in found["assumptions"]}
    kinds = ("published: ", "measured here: ", "assumed", "computed", "given")
    assert all(source.startswith(kinds) for _, source in sources.values())
    given = {key for key, (_, source) in sources.items() if source == "given"}
    assert given == {"turns.tokens", "turns.hours", "regions.here.rtt_ms", "hardware.h200.price"}


def test_prices_and_bytes_of_json_and_text_are_the_same_plan():
    found = json.loads(shown(machine=True))
    assert f"{found['machines']:,} machines and {found['money']:,.0f}" in shown()
    assert found["bottleneck"]["lane"] in {lane["name"] for lane in found["lanes"]}


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.layrs=3", "did you mean 'model.layers'"),
        ("turns.tokens=-1", "turns.tokens: .*greater"),
        ("turns.cached=1", "turns.cached: .*less than 1"),
        ("model.active=2e12", "model: .*active is more than parameters"),
        ("model.experts=0", "model: .*experts is 0"),
        ("model.parameters=nan", "model.parameters"),
        ("training.machines=2", "training.machines: 2 machines cannot hold"),
        ("evaluation.hardware=tpu", "evaluation.hardware: no class 'tpu'"),
        ("regions={}", "regions: .*at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(override, names):
    with pytest.raises(BadConfig, match=names):
        shown(overrides=[override])
