"""SmolLM2 over the embedded engine, except that a script chooses each token. The token's log-probability is the model's own."""

import json
import shutil
from contextlib import asynccontextmanager

import numpy as np
import torch

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded import engine as embedded
from ostinato.engine.embedded.worker import EngineThread
from ostinato.model.attention import logits
from ostinato.model.load import build, load_model, resolve, weights_of
from ostinato.model.logprobs import RowSoftmax

CONTEXT = 65_536
V0 = PolicyVersion(number=0, hash="0" * 64)


def stretched(work):
    """A copy of the model's folder with a context length that fits the agents' prompts."""
    path = work / "stretched"
    shutil.copytree(resolve("smollm2", work / "cache"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return path


class _Thread(EngineThread):
    def _draw(self, model, samples, states_MD):
        forced = [self.script(sample)[sample.sampled] for sample in samples]
        found = RowSoftmax.of(logits(model, states_MD), torch.ones(len(forced))).logprobs(np.array(forced)).tolist()
        for sample, token, logprob in zip(samples, forced, found, strict=True):
            self._take(sample, token, logprob, ())


@asynccontextmanager
async def scripted_engine(path, renderer, arithmetic, script, monkeypatch):
    """The engine, with V0 in its live slot. `script` maps a prompt's text to the answer."""
    (stop,) = renderer.stop_ids()
    known = {}

    def ids(sample):
        prompt = sample.request.prompt_ids
        if prompt not in known:
            known[prompt] = [*renderer.encode(script(renderer.decode(prompt))), stop]
        return known[prompt]

    monkeypatch.setattr(_Thread, "script", staticmethod(ids), raising=False)
    monkeypatch.setattr(embedded, "EngineThread", _Thread)
    engine = embedded.TorchEngine(
        build(path, torch.bfloat16), renderer, EngineConfig(kv_tokens=1 << 17), contract=arithmetic
    )
    await engine.start()
    try:
        await engine.load("live", Snapshot(policy=V0, weights=weights_of(load_model(path, torch.bfloat16))))
        yield engine
    finally:
        await engine.close()
