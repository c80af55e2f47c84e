"""`ostinato doctor` says whose answers lean, and refuses settings under which nobody's can."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from ostinato.adapt.prior import Population
from ostinato.adapt.privacy import gaussian_sigma
from ostinato.adapt.safety import silenced
from ostinato.adapt.styles import approval, styles_of
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.records import SteeringBasis
from ostinato.core.steering import Basis
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.doctor import CHECKS
from ostinato.weights.publish.publisher import VersionPublisher

look = dict(CHECKS)["dials"]
ON = "adapt.mode=dials"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "off: answers lean to nobody"),
        (
            [ON, "serve.user_keys=['a-secret-of-tests-1']"],
            "users that their tenant signs; a token moves by 0.1 nats at most; 10% of people are held out",
        ),
        ([ON, "adapt.users=declared"], "any user that a caller names; a token moves by"),
    ],
)
def test_whose_answers_lean_is_told(given, said, tmp_path):
    told = look(load(None, [*given, f"run.directory='{tmp_path}'"]))
    assert told.startswith(said)
    assert ("run `ostinato adapt fit` after the start" in told) == bool(given)


async def test_a_live_version_without_a_basis_is_told_with_the_remedy(tmp_path):
    config = load(None, [ON, "adapt.users=declared", f"run.directory='{tmp_path}'"])

    async def told():
        return await asyncio.to_thread(look, config)

    with open_run(config) as run:
        assert "after the start" in await told(), "nothing is live yet"
        publisher = VersionPublisher(run.store, run.config.publish)
        weights = {"w": WeightArray("BF16", (4,), np.ones(8, np.uint8))}
        done = await publisher.publish(0, weights, run="r", base=None, meta={"step": 0}, ref="live")
        assert "v0 is live and has no basis, so nobody's answers lean: run `ostinato adapt fit`" in await told()
        basis = Basis(("brief", "lists"), np.arange(3), np.ones((2, 3), np.float32), "f" * 64)
        await run.log.append(SteeringBasis.of(basis, at=1.0))
        assert "has no basis" in await told(), "that one is another version's"
        await run.log.append(SteeringBasis.of(replace(basis, weights=done.policy.hash), at=2.0))
        assert "v0 is live and has a basis of 2 dials: brief, lists" in await told()
        await run.log.append(SteeringBasis.of(replace(silenced(basis, basis.names), weights=done.policy.hash), at=3.0))
        assert "v0 is live and has no basis" in await told(), "every dial was dropped"


async def test_a_style_that_is_not_approved_for_the_live_version_is_told_with_the_remedy(tmp_path):
    styles = "adapt.styles.prompts={concise='Answer in one sentence.', steps='Answer in steps.'}"
    config = load(None, [styles, f"run.directory='{tmp_path}'"])
    concise, _ = styles_of(config.adapt)

    async def told():
        return await asyncio.to_thread(look, config)

    assert "run `ostinato adapt approve` after the start" in await told()
    with open_run(config) as run:
        assert "styles" not in await told(), "nothing is live yet"
        weights = {"w": WeightArray("BF16", (4,), np.ones(8, np.uint8))}
        publisher = VersionPublisher(run.store, run.config.publish)
        live = (await publisher.publish(0, weights, run="r", base=None, meta={"step": 0}, ref="live")).policy
        assert "v0, which is live: none" in await told()
        assert "warning: nobody is dealt concise, steps: run `ostinato adapt approve`" in await told()
        await run.log.append(approval(concise, live, passed=True, why="", at=1.0, shared=True))
        assert "v0, which is live: concise" in await told()
        assert "warning: nobody is dealt steps:" in await told()
        weights = {"w": WeightArray("BF16", (4,), np.zeros(8, np.uint8))}
        await publisher.publish(1, weights, run="r", base=live, meta={"step": 1}, ref="live")
        assert "warning: nobody is dealt concise, steps:" in await told(), "it was approved for other weights"


async def test_what_is_spent_of_the_priors_privacy_budget_is_told(tmp_path):
    private = "adapt.privacy={epsilon=2.0, releases=4}"
    config = load(None, [ON, "adapt.users=declared", private, f"run.directory='{tmp_path}'"])

    async def told(config=config):
        return await asyncio.to_thread(look, config)

    assert "priors of dials: epsilon 0.000 of 2 (delta 1e-06) spent in 365 days, by 0 of 4 releases" in await told()
    with open_run(config) as run:
        prior = Population.flat(2).row(names="9f", number=1, upto=0, at=wall_clock())
        await run.log.append(replace(prior, sigma=gaussian_sigma(2.0, 1e-6)), replace(prior, number=2))
    assert (
        "epsilon 2.000 of 2 (delta 1e-06) spent in 365 days, by 1 of 4 releases; 1 more without noise" in await told()
    )
    assert "priors" not in await told(load(None, [ON, "adapt.users=declared", f"run.directory='{tmp_path}'"]))


def test_what_vllm_cannot_do_is_told():
    vllm = ["adapt.users=declared", "engine.kind=vllm", "engine.urls=['http://127.0.0.1:8000']"]
    assert look(load(None, [ON, *vllm])).endswith("none with tools, and ratings of them teach no dial")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "serve.user_keys is empty, so nobody has dials"),
    ],
)
def test_dials_that_nobody_can_have_are_refused_with_the_remedy(given, message):
    with pytest.raises(BadConfig, match=message):
        look(load(None, [ON, *given]))
