"""Chunks dealt to ranks: each to one rank that has of it, and the bytes are those of the whole tensors."""

import math
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.deadlines import PATIENT_S

from ostinato.train.sharding import masters
from ostinato.train.sharding.balance import rows_of
from ostinato.train.sharding.masters import TensorDealing, owners, pieces_of

shapes = st.lists(
    st.one_of(st.tuples(st.integers(0, 40)), st.tuples(st.integers(0, 12), st.integers(1, 9))), min_size=1, max_size=6
)


class Group:
    """Ranks as threads."""

    def __init__(self, rank, count, pipes):
        self.rank, self.count, self._pipes = rank, count, pipes

    def send(self, tensor, rank):
        self._pipes[self.rank, rank].put(tensor.clone())

    def receive(self, into, rank):
        into.copy_(self._pipes[rank, self.rank].get(timeout=PATIENT_S))


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, ranks=st.integers(1, 5), chunk=st.integers(1, 30))
def test_the_parts_of_all_ranks_are_the_whole(shapes, ranks, chunk):
    before, masters.CHUNK_ELEMENTS = masters.CHUNK_ELEMENTS, chunk
    try:
        forms = {f"t{number}": ("BF16", shape) for number, shape in enumerate(shapes)}
        draw = np.random.default_rng(0)
        whole = {
            name: torch.from_numpy(draw.integers(-999, 999, shape, np.int16)) for name, (_, shape) in forms.items()
        }
        pipes = {(a, b): Queue() for a in range(ranks) for b in range(ranks)}

        def part(rank):
            own = {name: tensor[slice(*rows_of(len(tensor), ranks, rank))] for name, tensor in whole.items()}
            return TensorDealing(forms, Group(rank, ranks, pipes)).chunks(lambda name: own[name].clone())

        with ThreadPoolExecutor(ranks) as threads:
            parts = list(threads.map(part, range(ranks)))
    finally:
        masters.CHUNK_ELEMENTS = before
    found = {at: data for each in parts for at, data in each.items()}
    assert sum(map(len, parts)) == len(found)
    for name, tensor in whole.items():
        count = -(-tensor.numel() // chunk)
        joined = b"".join(found.pop((name, index)).tobytes() for index in range(count))
        assert joined == tensor.numpy().tobytes()
    assert not found


@given(shapes=shapes, ranks=st.integers(1, 5))
def test_pieces_cover_every_element_once(shapes, ranks):
    for shape in shapes:
        pieces = [piece for chunk in pieces_of(shape, ranks) for piece in chunk]
        assert [piece.first for piece in pieces] == [0, *(piece.last for piece in pieces)][: len(pieces)]
        assert sum(piece.last - piece.first for piece in pieces) == math.prod(shape)


def test_small_tensors_of_a_real_model_are_divided_evenly():
    """SmolLM2-135M's shapes: nearly every tensor is one chunk, of which each of two ranks has a half."""
    layer = {
        "q": (576, 576),
        "k": (192, 576),
        "v": (192, 576),
        "o": (576, 576),
        "gate": (1536, 576),
        "up": (1536, 576),
        "down": (576, 1536),
    }
    forms = {f"{number}.{name}": shape for number in range(30) for name, shape in layer.items()} | {
        "embed": (49152, 576)
    }
    for ranks in (2, 4):
        pieces = {(name, i): p for name, shape in forms.items() for i, p in enumerate(pieces_of(shape, ranks))}
        loads = [0] * ranks
        for at, rank in owners(pieces, dict.fromkeys(forms, 2)).items():
            loads[rank] += pieces[at][-1].last - pieces[at][0].first
        assert max(loads) < 1.05 * sum(loads) / ranks
