"""A real vLLM server follows the weight store: no stream is dropped, every bit is that of a fresh server, damage changes nothing.

Needs vLLM's environment: `python -m benchmarks.peers vllm`. One server lives through one story; the tests look at what it told.
OSTINATO_VLLM_COMPILE=1 lets vLLM compile the model, which takes minutes per server; without it the servers are eager.
"""

import asyncio
import json
import os
from dataclasses import dataclass, field
from pydoc_data import topics

import aiohttp
import numpy as np
import pytest
from tests.fakes.vllm import PYTHON, ROOT, VllmServer, usable

from ostinato.core.errors import Corrupt, Unavailable
from ostinato.core.weights import WeightArray
from ostinato.weights.follow.drive import VllmFollower
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.chain import Manifests

STREAMS, TOKENS = 6, 200
PROMPTS = [" ".join(topics.topics[name].split())[:900] for name in ("assignment", "class", "exceptions", "strings")]
LAYER = "model.layers.5."
OPTIONS = [] if os.environ.get("OSTINATO_VLLM_COMPILE") == "1" else ["--enforce-eager"]


pytestmark = [
    pytest.mark.examination,
    pytest.mark.skipif(not usable(), reason="needs vLLM's environment: python -m benchmarks.peers vllm"),
]


def perturbed(weights, seed, wanted=lambda name: True):
    """About 1% of the elements of the wanted tensors with their highest mantissa bit turned."""
    draw, found = np.random.default_rng(seed), dict(weights)
    for name in filter(wanted, weights):
        codes = weights[name].data.view("<u2").copy()
        codes[draw.random(codes.size) < 0.01] ^= 0x40
        found[name] = WeightArray(weights[name].dtype, weights[name].shape, codes.view(np.uint8))
    return found


@dataclass
class Story:
    """What the server answered, step by step."""

    answers: dict[str, list] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    fresh: dict[str, list] = field(default_factory=dict)
    streams: list = field(default_factory=list)
    open: list[bool] = field(default_factory=list)
    swaps: dict[str, object] = field(default_factory=dict)
    paused: list[bool] = field(default_factory=list)
    log: str = ""


class Client:
    def __init__(self, url, session):
        self.url, self.session = url, session

    async def post(self, path, body=None):
        async with self.session.post(self.url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def answers(self, *, forget=True):
        """Greedy tokens and the logprobs of them and of their five nearest, one prompt at a time."""
        if forget:
            assert (await self.post("/reset_prefix_cache"))["success"]
        found = []
        for prompt in PROMPTS:
            body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 5}
            choice = (await self.post("/v1/completions", body))["choices"][0]
            found.append((choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]))
        return found

    async def stream(self, number):
        """The pieces of one long answer, and how it ended."""
        body = {"model": "model", "prompt": PROMPTS[number % 4][: 100 + number], "max_tokens": TOKENS, "seed": number}
        body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        reasons, made = [], 0
        async with self.session.post(self.url + "/v1/completions", json=body) as reply:
            async for line in reply.content:
                if not line.startswith(b"data: ") or b"[DONE]" in line:
                    continue
                event = json.loads(line[6:])
                reasons += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
                made = event["usage"]["completion_tokens"] if event.get("usage") else made
        return reasons, made

    async def paused(self):
        async with self.session.get(self.url + "/is_paused") as reply:
            return (await reply.json())["is_paused"]


def start(model, work, name, **options):
    return VllmServer(PYTHON, model, source=ROOT, work=work, log=work / f"{name}.log", options=OPTIONS, **options)


async def versions(store, path):
    """v0 is the model; v1 differs everywhere; v2 in one block and the last norm; v3 everywhere; v4 is not of this model."""
    import torch

    from ostinato.model.load import load_model, weights_of

    first = dict(weights_of(load_model(path, torch.bfloat16)))
    second = perturbed(first, 1)
    third = perturbed(second, 2, lambda name: name.startswith(LAYER) or name == "model.norm.weight")
    norm = third["model.norm.weight"]
    codes = np.concatenate([norm.data, norm.data])
    other = third | {"model.norm.weight": WeightArray(norm.dtype, (2 * norm.shape[0],), codes)}
    publisher, base, found = VersionPublisher(store), None, []
    for number, weights in enumerate((first, second, third, perturbed(third, 3), other)):
        done = await publisher.publish(number, weights, run="vllm", base=base)
        base = done.policy
        found.append(done.policy)
    return found


async def refused(story, step, vllm, client, policy):
    try:
        await vllm.swap(policy)
    except (Corrupt, Unavailable) as error:
        story.errors[step] = f"{type(error).__name__}: {error}"
    story.paused.append(await client.paused())
    story.answers[step] = await client.answers()


async def fail_next_load(client, after):
    await client.post("/collective_rpc", {"method": "ostinato_fail_next_load", "args": [str(after)]})


async def tell(story, store, root, policies, path, work):
    follower = Follower(store)
    with start(path, work, "follows", extension="vllm_faults.FaultyWorker", path=[ROOT / "tests" / "e2e"]) as server:
        await server.ready()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
            VllmFollower(server.url, follower, {"url": str(root)}) as vllm,
        ):
            client = Client(server.url, session)
            story.answers["v0"] = await client.answers()
            await client.post("/init_weight_transfer_engine", {"init_info": {"url": str(root)}})
            await fail_next_load(client, 100)
            await refused(story, "v0 after a loader that failed", vllm, client, policies[1])
            story.swaps["v1"] = await vllm.swap(policies[1])
            story.answers["v1"] = await client.answers(forget=False)
            await damage_and_mend(story, store, root, vllm, client, policies[2])
            await refused(story, "v1 after another model", vllm, client, policies[4])
            await fail_next_load(client, 3)
            await refused(story, "v1 after a loader that failed", vllm, client, policies[2])
            story.swaps["v2"] = await vllm.swap(policies[2])
            story.answers["v2"] = await client.answers(forget=False)
            streams = [asyncio.create_task(client.stream(number)) for number in range(STREAMS)]
            await asyncio.sleep(2.0)
            story.swaps["v3"] = await vllm.swap(policies[3])
            story.open = [not stream.done() for stream in streams]
            story.streams = await asyncio.gather(*streams)
            story.answers["v3"] = await client.answers()
    story.log = (work / "follows.log").read_text(errors="replace")


async def damage_and_mend(story, store, root, vllm, client, policy):
    """The version's own payload rots on disk; the version is refused; then it is mended."""
    _, manifest = await Manifests(store).of_root(policy.hash)
    name = next(iter(manifest.objects()))
    file = root / "objects" / name[:2] / name[2:]
    sound = file.read_bytes()
    file.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    await refused(story, "v1 after damage", vllm, client, policy)
    file.write_bytes(sound)


async def compare(story, store, policies, path, work):
    """Fresh servers on the exported versions."""
    files = [file for file in path.iterdir() if file.suffix in (".json", ".jinja") and "safetensors" not in file.name]
    for step, policy in (("v2", policies[2]), ("v3", policies[3])):
        await Follower(store).materialise(policy, work / step, files)
        with start(work / step, work, f"fresh-{step}") as server:
            await server.ready()
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
                story.fresh[step] = await Client(server.url, session).answers()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    from ostinato.model.load import resolve

    work = tmp_path_factory.mktemp("vllm")
    path = resolve("smollm2", work / "cache")
    root = work / "store"

    async def whole():
        told, store = Story(), DirectoryStore(root)
        policies = await versions(store, path)
        await tell(told, store, root, policies, path, work)
        await compare(told, store, policies, path, work)
        return told

    return asyncio.run(whole())


def test_no_stream_is_dropped_by_a_swap_under_load(story):
    assert story.open == [True] * STREAMS
    assert story.streams == [(["length"], TOKENS)] * STREAMS


@pytest.mark.parametrize("step", ["v2", "v3"])
def test_what_was_swapped_in_answers_bit_for_bit_like_a_fresh_server(story, step):
    assert story.answers[step] == story.fresh[step]


def test_every_version_answers_otherwise(story):
    told = [story.answers[step] for step in ("v0", "v1", "v2", "v3")]
    assert all(a != b for index, a in enumerate(told) for b in told[index + 1 :])


@pytest.mark.parametrize(
    ("step", "before", "why"),
    [
        ("v1 after damage", "v1", "its payload does not have the hash in the manifest"),
        ("v1 after another model", "v1", "BadWeights: tensor 'model.norm.weight' has shape"),
        ("v0 after a loader that failed", "v0", "planted"),
        ("v1 after a loader that failed", "v1", "planted"),
    ],
)
def test_what_cannot_be_loaded_leaves_the_answers_bit_for_bit_as_they_were(story, step, before, why):
    assert why in story.errors[step]
    assert story.answers[step] == story.answers[before]


def test_the_server_is_never_left_paused_and_only_changed_parts_are_loaded(story):
    assert story.paused == [False] * 4
    assert "272 of 272 tensors loaded" in story.log
    assert "10 of 272 tensors loaded" in story.log  # nine of one block, and the last norm


def test_the_pauses_are_told(story, capsys):
    with capsys.disabled():
        for step, swap in story.swaps.items():
            print(f"\n{step}: paused {swap.pause_s:.3f} s, load {swap.load_s:.3f} s", end="")  # noqa: T201
    assert all(0 < swap.load_s < swap.pause_s for swap in story.swaps.values())
