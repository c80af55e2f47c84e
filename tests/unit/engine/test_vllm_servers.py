"""What the engine over vLLM servers does about servers that restart, hang, fail half-way or talk nonsense."""

import pytest
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm
from tests.unit.engine.test_vllm import SCRIPT, version

from ostinato.core.errors import Unavailable


async def test_a_swap_that_fails_after_the_load_leaves_nobody_believing_in_the_old_version():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest = driver.swap

        async def swap(policy, loaded):
            await honest(policy, loaded)
            raise Unavailable("paused and cannot be resumed")

        driver.swap = swap
        with pytest.raises(Unavailable, match="cannot be resumed"):
            await engine.load("live", version(2))
        driver.swap = honest
        await engine.load("live", version(1))
        assert (fake.label, engine.slots()["live"].number) == ("hash1", 1)
