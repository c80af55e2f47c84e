"""Unmodified coding agents over a vLLM server: every call is captured, every prompt is the tokens of the turn before and the new part.

The answers are scripted by a grammar that allows nothing else: vLLM draws the tokens, which have a log-probability of 0 under that
mask. Afterwards vLLM scores them without the mask, and the trainer's numbers must be near these. vLLM's arithmetic is not ours, and
beyond the 8,192 positions that the model was trained on the two diverge.
Needs the agents, `make agents`, and vLLM's environment, `python -m benchmarks.peers vllm`.
"""

import asyncio
import json
import shutil
import urllib.request
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.agents.solving import answer, passes, solve
from tests.fakes.vllm import ENGINE_OPTIONS, PYTHON, ROOT, VllmServer, usable

from ostinato.core.records import Branch, Purpose, Turn
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.vllm.engine import VllmEngine, open_vllm
from ostinato.model.load import load_model, resolve, weights_of
from ostinato.model.renderer import HFRenderer
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.drive import VllmFollower
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore

CONTEXT = 32_768  # SmolLM2's context, extended because the agents' prompts are longer
RESULT = Path(__file__).parents[1] / "examinations" / "results" / "agents_vllm.json"

pytestmark = [
    pytest.mark.examination,
    pytest.mark.skipif(not usable(), reason="needs vLLM's environment: python -m benchmarks.peers vllm"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server's URL, the model's folder, the weight store, and the published snapshot."""
    work = tmp_path_factory.mktemp("vllm-agents")
    path = work / "stretched"
    shutil.copytree(resolve("smollm2", work / "cache"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    weights = dict(weights_of(load_model(path, torch.bfloat16)))
    published = asyncio.run(VersionPublisher(DirectoryStore(work / "store")).publish(0, weights, run="vllm", base=None))
    options = [*ENGINE_OPTIONS, "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CONTEXT)]
    with VllmServer(PYTHON, path, source=ROOT, work=work, log=work / "vllm.log", options=options) as server:
        asyncio.run(server.ready(1200))
        yield server.url, path, work / "store", Snapshot(policy=published.policy, weights=weights)


class Scripted(VllmEngine):
    """The engine, except that each request carries a grammar that allows only the scripted answer."""

    def generate(self, request):
        said = self.script(self._renderer.decode(request.prompt_ids))
        return super().generate(replace(request, sampling=replace(request.sampling, grammar=literally(said))))


def literally(text):
    return f"start: {json.dumps(text)}"


async def test_an_agent_solves_a_task_over_vllm(agent, repo, home, served, monkeypatch):
    url, path, root, snapshot = served
    renderer, store = HFRenderer(path), DirectoryStore(root)

    def script(text):
        results = text.count("<tool_response>\n")
        return answer(agent.steps(repo), uses_tools=agent.uses_tools, told="</tools>" in text, results=results)

    monkeypatch.setattr(Scripted, "script", staticmethod(script), raising=False)
    monkeypatch.setattr("ostinato.engine.vllm.engine.VllmEngine", Scripted)
    config = EngineConfig(kind="vllm", urls=(url,), silence_s=600)
    engine = await open_vllm(
        config, renderer, lambda at: VllmFollower(at, Follower(store), {"url": str(root)}, kv="keep")
    )
    before = cached(url)
    try:
        await engine.start()
        await engine.load("live", snapshot)
        log, refused = await solve(agent, repo, home, engine, renderer, longest_s=400, chunk_timeout_s=380)
        from_cache = cached(url) - before
        turns = [row for row in log.rows if isinstance(row, Turn)]
        told = await unmasked(engine, turns)
    finally:
        await engine.close()
    assert passes(repo)
    assert refused == []
    own = [turn for turn in turns if turn.purpose is Purpose.TASK]
    assert {turn.branch for turn in turns} == {Branch.NONE}
    assert {span.policy for turn in turns for span in turn.spans} == {snapshot.policy}
    if agent.uses_tools:
        assert [turn.text for turn in own[:3]] == agent.steps(repo)
        for one, other in pairwise(own):
            known = one.prompt_ids + one.sampled_ids
            assert (other.parent, other.prompt_ids[: len(known)]) == (one.id, known)
    assert all(logprob == pytest.approx(0.0, abs=1e-4) for turn in turns for logprob in turn.logprobs)
    scores = PolicyTrainer(path, TrainConfig(compute="bf16", publish="bf16")).score(turns)
    pairs = [pair for turn, ours in zip(turns, scores, strict=True) for pair in zip(told[turn.id], ours, strict=True)]
    assert len(pairs) == sum(len(turn.sampled_ids) for turn in turns)
    away = np.abs(np.diff(pairs, axis=1))
    assert np.ptp(pairs) > 5.0  # some tokens are nearly certain, and some are not
    shifted = np.abs(np.diff([(one, other) for (one, _), (_, other) in pairwise(pairs)], axis=1))
    assert np.mean(away) < np.mean(shifted) / 4  # the pairs are of the same tokens, not of neighbours
    note(
        agent.name,
        turns=len(turns),
        prompts=[len(turn.prompt_ids) for turn in turns],
        from_cache=from_cache,
        tokens=len(pairs),
        mean_difference=float(f"{np.mean(away):.4f}"),
        mean_difference_of_neighbours=float(f"{np.mean(shifted):.4f}"),
        largest_difference=float(f"{np.max(away):.4f}"),
    )


async def unmasked(engine, turns):
    """The server's log-probabilities of each turn's sampled tokens without a grammar, from one pass over the last turn of each session."""
    by_id, found = {turn.id: turn for turn in turns}, {}
    for last in turns:
        if any(turn.parent == last.id for turn in turns):
            continue
        path = [last]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        start = len(path[-1].prompt_ids)
        scores = await engine.score("live", last.prompt_ids + last.sampled_ids, start)
        for turn in path:
            at = len(turn.prompt_ids) - start
            found[turn.id] = scores[at : at + len(turn.sampled_ids)]
    return found


def cached(url):
    """The number of prompt tokens that the server has found in its prefix cache so far."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:prefix_cache_hits_total")))


def note(name, **found):
    """Write an agent's figures to the results file, beside those of the other agents."""
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(known | {name: found}, indent=1) + "\n")
