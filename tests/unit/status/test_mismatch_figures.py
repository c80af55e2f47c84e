"""What the demo's summary says of trainer against engine, and how many servers it asks for."""

import pytest

from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.demo import check_servers
from ostinato.status.observed_run import Observed, mismatch_rows


def step(prefix, tokens, differing=0.0, **figures):
    return {f"{prefix}{name}": value for name, value in {"tokens": tokens, "differing": differing, **figures}.items()}


def test_an_exact_engine_differs_nowhere():
    seen = Observed(steps=[step("mismatch_", 40.0, k3=0.0, max_abs=0.0, truncated=0.0), step("mismatch_", 0.0)])
    assert mismatch_rows(seen) == [("trainer against engine, same weights", "0 of 40 tokens differ")]


def test_a_foreign_engine_is_weighed_by_tokens_and_its_same_weights_stand_apart():
    one = step("foreign_", 100.0, 90.0, k3=1e-3, max_abs=0.5, truncated=0.0)
    two = step("foreign_", 300.0, 290.0, k3=5e-3, max_abs=0.2, truncated=0.04)
    same = step("foreign_same_", 50.0, 40.0, k3=2e-4, max_abs=0.06, truncated=0.0)
    assert mismatch_rows(Observed(steps=[one | same, two])) == [
        ("trainer against a foreign engine", "k3 0.004 nats per token over 400, at most 0.5 apart, 3% of weights cut"),
        ("of these, same weights", "k3 0.0002 nats per token over 50, at most 0.06 apart, 0% of weights cut"),
    ]
    assert mismatch_rows(Observed()) == []


def test_the_mode_is_said_with_the_reason_that_it_is_not_exact():
    exact, fast = {"mode": "exact", "why": ""}, {"mode": "fast", "why": "linear 8 -> 8 gives other bits"}
    assert mismatch_rows(Observed(numerics=[fast, exact])) == [("numerics", "exact")]
    assert mismatch_rows(Observed(numerics=[exact, fast])) == [("numerics", "fast: linear 8 -> 8 gives other bits")]


@pytest.mark.parametrize(("count", "replicas", "enough"), [(4, "{}", False), (5, "{}", True), (5, "{live=2}", False)])
def test_the_demo_asks_for_a_server_for_each_version_that_it_loads_at_once(count, replicas, enough):
    urls = [f"http://a:{port}" for port in range(count)]
    config = load(None, ["engine.kind='vllm'", f"engine.urls={urls}", f"engine.replicas={replicas}"])
    if enough:
        check_servers(config)
    else:
        with pytest.raises(BadConfig, match=r"engine\.urls names"):
            check_servers(config)
