"""One step's arithmetic, spread over lanes: threads that each run a part of the batch through the whole model.

Lanes need no barrier inside a layer, whereas a team of OpenMP threads needs two per operation; each lane runs torch with one thread. A
row's bits do not depend on the rows beside it, so they do not depend on the lanes. If there is too little work for two parts, a team
computes the single part after all: for few tokens the cost is that of reading the weights, and two cores read faster than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.engine.embedded.forms.condensed import is_condensed
from ostinato.engine.embedded.kv import KVStore
from ostinato.engine.embedded.sampler import Draw, Drawn, draw
from ostinato.engine.embedded.scheduler import Scheduled
from ostinato.model import routing
from ostinato.model.attention import hidden, logits
from ostinato.model.devices.backend import backend_of
from ostinato.model.paged import PagedEntry
from ostinato.model.threads import team

A = TypeVar("A")
B = TypeVar("B")
_WORTH = 8  # a part with fewer tokens is not worth reading all weights for


class Lanes:
    """`count` threads, including the caller's. `wide`: a single item may use them all, because that changes no bit.

    Example: ``Lanes(2).map(run, parts)``.
    """

    def __init__(self, count: int, *, wide: bool = False) -> None:
        self.count, self._wide = count, wide
        self._pool = ThreadPoolExecutor(
            max(1, count - 1), thread_name_prefix="ostinato-lane", initializer=torch.set_num_threads, initargs=(1,)
        )

    def parts(self, model: PreTrainedModel) -> int:
        """The best number of parts for a model's work: 1 if the threads, or a device, share the work anyway."""
        shared = backend_of(model).device != "cpu" or (self._wide and is_condensed(model))
        return 1 if shared else self.count

    def map(self, run: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Apply `run` to every item. Each free lane takes the next item, so the longest items should come first.

        Returns the results in the items' order. Raises what `run` raises, after all lanes have ended.
        """
        if len(items) == 1:
            with team(self.count if self._wide else torch.get_num_threads()):
                return [run(items[0])]
        found: list[B | None] = [None] * len(items)
        waiting = deque(enumerate(items))

        def lane() -> None:
            while waiting:
                try:
                    at, item = waiting.popleft()
                except IndexError:  # another lane took the last item
                    return
                found[at] = run(item)

        others = [self._pool.submit(lane) for _ in range(min(self.count, len(items)) - 1)]
        try:
            lane()
        finally:
            for other in others:
                other.exception()  # wait: no lane may still be writing keys when the next step begins
        for other in others:
            other.result()
        return cast("list[B]", found)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class LanePart:
    """Pieces of one policy's work that one lane computes."""

    model: PreTrainedModel
    pieces: list[Scheduled]

    @property
    def tokens(self) -> int:
        """The number of tokens that it computes."""
        return sum(piece.end - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Ran:
    """A part's results: the final state of each piece's last token, and each piece's experts per token [n, L, k], if any.

    `recorded`: a recorded pass was replayed.
    """

    states_RD: Tensor
    routes: list[NDArray[np.integer[Any]]] | None
    recorded: bool = False


def cut(model: PreTrainedModel, pieces: Sequence[Scheduled], lanes: int) -> list[LanePart]:
    """Divide work among lanes by tokens. The longest pieces come first; single tokens that share a prompt are adjacent."""
    pieces = sorted(pieces, key=lambda piece: (piece.start - piece.end, piece.sample.blocks))
    total = sum(piece.end - piece.start for piece in pieces)
    router = routing.of(model)
    lanes = min(lanes, total // _WORTH) if router is None else 1  # routes are recorded by one call at a time
    if lanes <= 1:
        return [LanePart(model, pieces)]
    parts: list[list[Scheduled]] = [[] for _ in range(lanes)]
    load = [0] * lanes
    for piece in pieces:
        size = piece.end - piece.start
        fair = load.index(min(load)) if size > 1 else next((i for i in range(lanes) if load[i] * lanes < total), -1)
        parts[fair].append(piece)
        load[fair] += size
    return [LanePart(model, part) for part in parts if part]


@torch.inference_mode()
def forward(part: LanePart, store: KVStore) -> Ran:
    """Run the part's pieces through the model; afterwards their keys and values are in the store."""
    pieces, router = part.pieces, routing.of(part.model)
    device = part.model.device
    tokens = [token for p in pieces for token in p.sample.ids[p.start : p.end]]
    entries = [PagedEntry(start=p.start, end=p.end, blocks=p.sample.blocks) for p in pieces]
    if len(tokens) == len(pieces) and router is None:
        states_RD = store.decoded(part.model, tokens, entries)
        if states_RD is not None:
            return Ran(states_RD, None, recorded=True)
    ids = torch.tensor(tokens).to(device)
    positions = torch.tensor([position for p in pieces for position in range(p.start, p.end)]).to(device)
    plan = store.attend(entries)
    with router.record() if router is not None and router.can_record else nullcontext() as recording:
        states_ND = hidden(part.model, ids, positions, plan)
    ends = np.cumsum([p.end - p.start for p in pieces])
    routes = None if recording is None else np.split(recording.ids_NLk().cpu().numpy(), ends[:-1])
    return Ran(states_ND[torch.from_numpy(ends - 1).to(device)], routes)


@torch.inference_mode()
def sample(model: PreTrainedModel, states_MD: Tensor, rows: Sequence[Draw], lanes: Lanes) -> Drawn:
    """Draw one token for each of M states, as `rows` specifies."""
    together, kernels = lanes.parts(model) == 1, backend_of(model).kernels
    made_MV = lanes.map(lambda states_MD: logits(model, states_MD), [states_MD])[0] if together else None
    share = -(-len(rows) // lanes.count) if kernels == "own" else len(rows)
    starts = range(0, len(rows), max(share, _WORTH))

    def part(start: int) -> Drawn:
        stop = min(start + max(share, _WORTH), len(rows))
        with torch.inference_mode():
            own_MV = logits(model, states_MD[start:stop]) if made_MV is None else made_MV[start:stop]
            return draw(own_MV, rows[start:stop], kernels)

    parts = lanes.map(part, starts)
    return Drawn(
        tokens=[token for drawn in parts for token in drawn.tokens],
        logprobs=[logprob for drawn in parts for logprob in drawn.logprobs],
        sound=[sound for drawn in parts for sound in drawn.sound],
        tops=[tops for drawn in parts for tops in drawn.tops],
    )
