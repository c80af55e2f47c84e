"""A person's dials over the real engine: what they accept moves what is sampled for them, and for nobody else."""

import numpy as np
from tests.unit.adapt.people import cache_at
from tests.unit.serve.gateway_world import world

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.core.records import SteeringBasis
from ostinato.core.steering import Basis
from ostinato.engine.config import EngineConfig
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.tiny_engine import tiny_engine

ASK = {"max_tokens": 12, "temperature": 1.0}
CONFIG = AdaptConfig(mode="dials", users="declared", holdout=0.0)


async def test_what_a_person_accepts_is_sampled_more_for_them_alone(tmp_path):
    async with tiny_engine(tmp_path, EngineConfig(kv_tokens=4096, block=16, max_batch=8)) as tiny:
        weights = tiny.engine.slots()["live"].hash
        directions = np.array([[1.0] * 40 + [0.0] * 40, [0.0] * 40 + [1.0] * 40], np.float32)
        basis = Basis(names=("low", "high"), tokens_M=np.arange(40, 120), directions_KM=directions, weights=weights)
        log = MemoryLog()
        await log.append(SteeringBasis.of(basis, at=1.0))
        adaptation = DialAdaptation(log, cache_at(tmp_path), CONFIG)
        await adaptation.follow()
        async with world(engine=tiny.engine, log=log, renderer=ByteRenderer(), adaptation=adaptation) as w:
            for number in range(40):
                w.now += 1.0  # answers of one person are told apart by when they began
                status, headers, _ = await w.chat(user="ann", seed=number, **ASK)
                assert status == 200
                assert basis.hash in headers["x-ostinato-adapted"]
                turn = log.turns()[-1]
                low = sum(40 <= token < 80 for token in turn.sampled_ids)
                await w.feedback(
                    turn.id, id=f"s{number}", value=low > sum(80 <= token < 120 for token in turn.sampled_ids)
                )
                await adaptation.follow()
            said = {}
            for user in ("ann", "bob", "anonymous"):
                for seed in range(100, 106):
                    await w.chat(
                        {"x-ostinato-adapt": "off"} if user == "anonymous" else {}, user=user, seed=seed, **ASK
                    )
                said[user] = log.turns()[-6:]
    dials = said["ann"][-1].steered.dials
    assert dials[0] > dials[1] + 0.2
    assert all(turn.steered.dials == (0.0, 0.0) and turn.steered.kl == 0.0 for turn in said["bob"])
    assert sum(turn.steered.kl for turn in said["ann"]) > 0.0
    sampled = {user: [(turn.sampled_ids, turn.logprobs) for turn in turns] for user, turns in said.items()}
    assert sampled["bob"] == sampled["anonymous"] != sampled["ann"]
