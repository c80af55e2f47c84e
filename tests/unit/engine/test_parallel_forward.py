import threading
from collections import Counter

import pytest
import torch
from tests.deadlines import PATIENT_S

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.engine.embedded.form import prepack
from ostinato.engine.embedded.kv import KVShape, Store
from ostinato.engine.embedded.sampler import Draw
from ostinato.engine.embedded.scheduler import Generation, Scheduled
from ostinato.engine.embedded.worker import Lanes, draw_rows, forward, split_work
from ostinato.model.load import load_model
from ostinato.testing.tiny import tiny_model, tiny_moe

V0 = PolicyVersion(number=0, hash="0" * 64)


def piece(index: int, start: int, end: int) -> Scheduled:
    request = Generate(id=f"r{index}", slot="live", prompt_ids=tuple(range(end)), sampling=Sampling(max_tokens=4))
    blocks = [index * 4 + i for i in range(4)]
    made = Generation(request=request, index=0, seed=0, ids=[(7 * index + i) % 256 for i in range(end)], policy=V0)
    made.blocks = blocks
    return Scheduled(sample=made, start=start, end=end, last=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny_model(tmp_path_factory.mktemp("m") / "tiny"), torch.float32)


def test_work_is_divided_by_tokens_and_nothing_is_lost(model):
    pieces = [piece(i, 0, n) for i, n in enumerate([40, 1, 1, 30, 1, 1, 1, 9])]
    parts = split_work(model, pieces, 2)
    assert sorted(p.sample.request.id for part in parts for p in part.pieces) == [f"r{i}" for i in range(8)]
    loads = [sum(p.end - p.start for p in part.pieces) for part in parts]
    assert max(loads) - min(loads) <= 1
    assert len(split_work(model, pieces[1:3], 2)) == 1  # too little to share


def test_single_tokens_of_one_prompt_stand_side_by_side(model):
    pieces = [piece(i, 39, 40) for i in range(32)]
    for i, work in enumerate(pieces):
        work.sample.blocks = [100 + i % 4, 200 + i]
    for part in split_work(model, pieces, 2):
        first = [work.sample.blocks[0] for work in part.pieces]
        assert first == sorted(first)
        assert len(first) == 16


def test_a_mixture_of_experts_runs_in_one_lane(tmp_path):
    moe = load_model(tiny_moe(tmp_path / "moe"), torch.float32)
    assert len(split_work(moe, [piece(i, 0, 40) for i in range(4)], 2)) == 1


def test_lanes_change_no_bit(model):
    pieces = [piece(i, 0, n) for i, n in enumerate([33, 20, 8, 40, 11])]
    shape = KVShape(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32)
    lanes = Lanes(2)
    memory = Store(shape, 20, 16)
    parts = split_work(model, pieces, 2)
    assert len(parts) == 2
    found = {}
    for part, ran in zip(parts, lanes.map(lambda part: forward(part, memory), parts), strict=True):
        found |= {p.sample.request.id: state for p, state in zip(part.pieces, ran.states_RD, strict=True)}
    memory = Store(shape, 20, 16)
    (part,) = split_work(model, pieces, 1)
    alone = forward(part, memory).states_RD
    assert all(torch.equal(found[p.sample.request.id], alone[i]) for i, p in enumerate(part.pieces))
    rows = [Draw(temperature=1.0, top_p=1.0, u=(i + 0.5) / 40) for i in range(40)]
    states = alone.repeat(8, 1)
    assert draw_rows(model, states, rows, lanes) == draw_rows(model, states, rows, Lanes(1))
    lanes.close()


def test_what_stands_alone_has_all_threads_if_that_changes_no_bit(model):
    torch.set_num_threads(1)
    assert Lanes(2, wide=True).map(lambda _: torch.get_num_threads(), [0]) == [2]
    assert Lanes(2).map(lambda _: torch.get_num_threads(), [0]) == [1]
    assert Lanes(2, wide=True).map(lambda _: torch.get_num_threads(), [0, 1]) == [1, 1]
    assert torch.get_num_threads() == 1
    shape = KVShape(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32)
    (part,) = split_work(model, [piece(0, 0, 12)], 2)
    found = [Lanes(2, wide=wide).map(lambda p: forward(p, Store(shape, 4, 16)), [part])[0] for wide in (True, False)]
    assert torch.equal(found[0].states_RD, found[1].states_RD)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_two_threads_give_a_fused_model_the_bits_of_one(tmp_path, count):
    path = tiny_model(tmp_path / "wider", hidden=256)
    engine = load_model(path, torch.float32)
    assert prepack(engine) == 2 * 7 + 1
    shape = KVShape(layers=2, kv_heads=2, head_dim=64, dtype=torch.float32)
    (part,) = split_work(engine, [piece(0, 0, count)], 2)
    draws = [Draw(temperature=1.0, top_p=1.0, u=0.5)]
    found = []
    for lanes in (Lanes(2, wide=True), Lanes(1)):
        (ran,) = lanes.map(lambda p: forward(p, Store(shape, 4, 32)), [part])
        found.append((ran.states_RD, draw_rows(engine, ran.states_RD, draws, lanes)))
        lanes.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_no_lane_waits_while_there_is_work():
    """Four equal parts of two policies: each of two lanes takes two, where one lane for the first and one for the rest would take three."""
    done, both = [], threading.Barrier(2, timeout=PATIENT_S)

    def run(item):
        both.wait()  # two parts are always under way: a lane that took three would leave the third alone, and the barrier breaks
        done.append((threading.get_ident(), item))
        return item * 10

    assert Lanes(2).map(run, [0, 1, 2, 3]) == [0, 10, 20, 30]
    assert sorted(Counter(lane for lane, _ in done).values()) == [2, 2]


def test_an_error_in_a_lane_is_raised_after_all_have_ended():
    ended = []

    def run(item: int) -> None:
        if item == 0:
            raise ValueError("here")
        ended.append(item)

    with pytest.raises(ValueError, match="here"):
        Lanes(3).map(run, [0, 1, 2])
    assert sorted(ended) == [1, 2]
