"""The contract of every Engine, tested on the fake, the embedded engine, and the client of vLLM servers."""

import asyncio
import contextlib
import math
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.fakes.step_gate import StepGate
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm

from ostinato.core.errors import BadRequest, BadWeights, NotFound, TooLarge, Unavailable
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, PolicyVersion, Sampling
from ostinato.core.seams import Engine
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.backend import ComputeBackend
from ostinato.model.linear import choose_integers
from ostinato.model.numerics import contract as contract_of
from ostinato.testing.engine import FakeEngine
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCRIPT = "a scripted answer that is long enough for every test of this contract, and then goes on for a while longer"


KINDS = ["fake", "embedded", "embedded, int8", "embedded, torch's kernels", "vllm", "vllm, two servers a slot"]


@asynccontextmanager
async def started(kind, directory):
    """An engine of this kind with version 0 in its slot "live", and the vLLM servers that it has."""
    if kind == "fake":
        fake = FakeEngine(lambda _: SCRIPT, context=512)
        await fake.start()
        yield fake, []
        await fake.close()
    elif kind == "embedded, int8":
        integers = choose_integers([64, 128])
        contract = contract_of(torch.float32, "fast", threads=1, block=16, quantisation=integers.name)
        async with tiny_engine(directory, integers=integers, contract=contract) as tiny:
            yield tiny.engine, []
    elif kind.startswith("embedded"):
        backend = ComputeBackend(kernels="torch" if "torch" in kind else "own")
        async with tiny_engine(directory, backend=backend) as tiny:
            yield tiny.engine, []
    else:
        count = 1 if kind == "vllm" else 2
        servers = [TokenVllm(SCRIPT) for _ in range(2 * count)]
        async with vllm_engine(*servers, replicas={"live": count, "canary": count}) as engine:
            await engine.load("live", tiny_snapshot(directory, 0, seed=0))
            yield engine, servers


@pytest_asyncio.fixture(params=KINDS, scope="module", loop_scope="module")
async def shared(request, tmp_path_factory):
    """One engine of each kind for all tests that leave its slots as they are, and its servers."""
    async with started(request.param, tmp_path_factory.mktemp("engine")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared):
    """The shared one, once it does nothing any more: an engine's thread may end a sample after its last chunk was read."""
    async with asyncio.timeout(PATIENT_S):
        while shared[0].stats()["running"]:
            await asyncio.sleep(0.005)
    return shared[0]


@pytest.fixture
def servers(shared):
    """The shared engine's vLLM servers, if it has any. Whatever a test made of their pace ends with it."""
    yield shared[1]
    for server in shared[1]:
        server.slow_s, server.held = 0.0, False


@pytest_asyncio.fixture(params=KINDS, loop_scope="module")
async def fresh(request, tmp_path):
    """An engine for one test, which may load into its slots or close it, and its servers."""
    async with started(request.param, tmp_path) as found:
        yield found


def ask(*, n=1, ids=tuple(b"some prompt"), slot="live", **sampling):
    return Generate(id="r", slot=slot, prompt_ids=ids, n=n, sampling=Sampling(**({"max_tokens": 8} | sampling)))


async def collect(engine, request):
    return [chunk async for chunk in engine.generate(request)]


async def test_implements_the_seam(engine):
    assert isinstance(engine, Engine)
    assert engine.slots()["live"].number == 0


async def test_names_the_contract_that_it_computes_under(engine):
    contract = engine.contract()
    assert engine.numerics() == ("" if contract is None else contract.id)


async def test_each_sample_ends_once_and_last(engine):
    chunks = await collect(engine, ask(n=3, temperature=1.0))
    for index in range(3):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.finish for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish in (Finish.STOP, Finish.LENGTH)
        assert 1 <= sum(len(chunk.ids) for chunk in mine) <= 8
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
    assert all(math.isfinite(lp) and lp <= 0 for chunk in chunks for lp in chunk.logprobs)
    assert {chunk.policy for chunk in chunks} == {engine.slots()["live"]}


async def test_budget_is_kept(engine):
    chunks = await collect(engine, ask(max_tokens=5, temperature=0.0))
    assert sum(len(chunk.ids) for chunk in chunks) == 5
    assert chunks[-1].finish is Finish.LENGTH


async def test_seed_is_returned_and_repeats(engine):
    first, again = [await collect(engine, ask(seed=41)) for _ in range(2)]
    assert first == again
    assert {chunk.seed for chunk in first} == {41}
    free = await collect(engine, ask())
    assert len({chunk.seed for chunk in free}) == 1


async def test_stop_string_is_never_shown_and_its_tokens_are_kept(engine):
    whole = await collect(engine, ask(max_tokens=40, seed=5))
    text = "".join(chunk.text for chunk in whole)
    stop = text[6:9]
    cut = await collect(engine, ask(max_tokens=40, seed=5, stop=(stop,)))
    assert "".join(chunk.text for chunk in cut) == text[: text.index(stop)]
    assert cut[-1].finish is Finish.STOP
    ids = [i for chunk in cut for i in chunk.ids]
    assert ids == [i for chunk in whole for i in chunk.ids][: len(ids)]


async def test_score_agrees_with_generate(engine):
    request = ask(max_tokens=12, temperature=1.0, seed=3)
    chunks = await collect(engine, request)
    ids = [i for chunk in chunks for i in chunk.ids]
    scores = await engine.score("live", [*request.prompt_ids, *ids], len(request.prompt_ids))
    assert scores == pytest.approx([lp for chunk in chunks for lp in chunk.logprobs], abs=1e-4)


REFUSED = [
    (ask(slot="nowhere"), NotFound, "model"),
    (ask(ids=()), BadRequest, "messages"),
    (ask(ids=(1,) * 512), TooLarge, "messages"),
    (ask(ids=(1,) * 500, max_tokens=13), BadRequest, "max_tokens"),
    (ask(ids=(10**6,)), BadRequest, "messages"),
    (ask(ids=(-1,)), BadRequest, "messages"),
    (ask(max_tokens=0), BadRequest, "max_tokens"),
    (ask(temperature=-1.0), BadRequest, "temperature"),
    (ask(temperature=math.nan), BadRequest, "temperature"),
    (ask(top_p=0.0), BadRequest, "top_p"),
    (ask(stop=("",)), BadRequest, "stop"),
    (ask(n=0), BadRequest, "n"),
    (ask(n=1000), TooLarge, "n"),
    (replace(ask(), within_s=math.nan), BadRequest, "within_s"),
]


async def refusal(engine, request):
    """The kind of error that a request meets, and the field that it names."""
    try:
        await collect(engine, request)
    except BadRequest as error:
        return type(error), error.field
    return None, None


async def test_bad_requests_name_their_field(engine):
    """All by one engine: each is refused before anything is computed, so none can spoil the next."""
    found = [(request, *await refusal(engine, request)) for request, _, _ in REFUSED]
    assert found == REFUSED
    assert engine.stats()["running"] == 0


@pytest.mark.parametrize(
    ("ids", "start", "kind", "field"),
    [
        ([1, 2], 0, BadRequest, "start"),
        ([1, 2], 3, BadRequest, "start"),
        ([], 1, BadRequest, "start"),
        ([1, -1], 1, BadRequest, "ids"),
        ([1, 10**6], 1, BadRequest, "ids"),
        ([1] * 513, 1, TooLarge, "ids"),
    ],
)
async def test_what_cannot_be_scored_names_its_field(engine, ids, start, kind, field):
    with pytest.raises(BadRequest) as caught:
        await engine.score("live", ids, start)
    assert (type(caught.value), caught.value.field) == (kind, field)


async def test_closing_the_iterator_stops_the_work(engine, servers):
    """Held after its first tokens, so that it cannot come to its end."""
    for server in servers:
        server.slow_s = 0.05
    with StepGate(engine) if isinstance(engine, TorchEngine) else contextlib.nullcontext():
        stream = engine.generate(ask(max_tokens=60, n=4, temperature=0.0))
        await anext(stream)
        for server in servers:
            server.held = True
        assert engine.stats()["running"] == 4
        await stream.aclose()
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while engine.stats()["running"] or any(server.open for server in servers):
                await asyncio.sleep(0.005)


async def test_one_sample_may_be_ended_and_the_others_go_on(engine):
    stream, ended = engine.generate(ask(max_tokens=20, n=2, temperature=0.0)), False
    async for chunk in stream:
        if chunk.index == 0 and not ended:
            ended = True
            assert await engine.end_sample("r", 0, 1) == b"", "this model has no experts"
            assert await engine.end_sample("another", 0, 1) == b""
        if chunk.index == 1 and chunk.finish is not None:
            break
    await stream.aclose()
    assert await engine.end_sample("r", 1, 1) == b""
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while engine.stats()["running"]:
            await asyncio.sleep(0.005)


async def test_a_time_that_is_over_ends_it_without_a_token(engine):
    for within_s in (0.0, -3.0):
        chunks = await collect(engine, replace(ask(n=3), within_s=within_s))
        assert [(chunk.ids, chunk.text, chunk.finish) for chunk in chunks] == [((), "", Finish.DEADLINE)] * 3
        assert {chunk.index for chunk in chunks} == {0, 1, 2}
    assert engine.stats()["running"] == 0
    assert len(await collect(engine, ask())) > 0, "others go on"


@pytest.mark.parametrize("within_s", [1e9, math.inf])
async def test_a_time_that_lasts_changes_nothing(engine, within_s):
    free, timed = [await collect(engine, replace(ask(seed=4), within_s=each)) for each in (None, within_s)]
    assert timed == free


async def test_load_names_the_version_and_counts_the_streams(fresh, tmp_path):
    engine, servers = fresh
    snapshot = tiny_snapshot(tmp_path, 7, seed=1)
    for server in servers:
        server.slow_s = 0.01  # so that they are held at their first tokens
    stream = engine.generate(ask(max_tokens=450, n=2, temperature=0.0))
    # no stream comes to its end before the load does; the fake makes a token only when it is asked for one
    with StepGate(engine) if isinstance(engine, TorchEngine) else contextlib.nullcontext():
        await anext(stream)
        for server in servers:
            server.held = True
        began = time.perf_counter()
        swap = await engine.load("live", snapshot)
        took = time.perf_counter() - began
    for server in servers:
        server.held = False
    assert (swap.slot, swap.policy, swap.streams) == ("live", snapshot.policy, 2)
    assert 0 <= swap.pause_s < took, "seconds, and less than the whole of it"
    assert engine.slots()["live"] == snapshot.policy
    versions = [chunk.policy.number async for chunk in stream]
    assert versions == sorted(versions)
    assert versions[-1] == 7


async def test_slots_are_independent(fresh, tmp_path):
    engine, _ = fresh
    await engine.load("canary", tiny_snapshot(tmp_path, 3, seed=2))
    live, canary = [await collect(engine, ask(slot=slot)) for slot in ("live", "canary")]
    assert {c.policy.number for c in live} == {0}
    assert {c.policy.number for c in canary} == {3}
    await engine.unload("canary")
    assert set(engine.slots()) == {"live"}
    with pytest.raises(NotFound):
        await engine.unload("canary")


async def test_nan_is_refused_and_the_slot_keeps_its_version(fresh, tmp_path):
    engine, _ = fresh
    good = tiny_snapshot(tmp_path, 9, seed=1)
    name, array = next((n, a) for n, a in good.weights.items() if a.dtype == "F32")
    data = array.data.copy()
    data[:4] = (0, 0, 0xC0, 0x7F)  # a float32 NaN
    bad = dict(good.weights) | {name: WeightArray(array.dtype, array.shape, data)}
    before = engine.slots()
    with pytest.raises(BadWeights):
        await engine.load("live", Snapshot(policy=PolicyVersion(number=9, hash="nan"), weights=bad))
    assert engine.slots() == before


async def test_closed_means_unavailable(fresh):
    engine, _ = fresh
    await engine.close()
    with pytest.raises(Unavailable):
        await collect(engine, ask())
