"""The primitives of a forward pass, each computed in every shape that can occur, and the elements whose bits differ from one big call.

Every function returns (name of the case, elements compared, elements that differ).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor, nn

from ostinato.engine.embedded.form import prepack
from ostinato.model.kernels.softmax import TILE
from ostinato.model.linear import Linear
from ostinato.model.logprobs import RowSoftmax
from ostinato.model.paged import Blocks, PagedEntry, Reads, TokenPlaces

WIDTHS = (64, 576, 1536, 4096)
ROW_COUNTS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 255, 256, 257)
LENGTHS = (1, 17, 33, 100, 257, 513, 1100, 2048)
Case = tuple[str, int, int]
Numbers = Callable[..., Tensor]


def differing(one: Tensor, other: Tensor) -> int:
    """Elements whose bits differ."""
    kind = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    return int((one.contiguous().view(kind) != other.contiguous().view(kind)).sum())


def numbers(seed: int) -> Numbers:
    """Normal draws that depend only on the seed and the order of the calls."""
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source)


@torch.inference_mode()
def linear(
    dtype: torch.dtype,
    inputs: int,
    *,
    packed: bool = False,
    stock: bool = False,
    outputs: int = 1536,
    counts: Sequence[int] = ROW_COUNTS,
    elements: int = 300_000,
) -> Generator[Case]:
    """A linear layer at each row count against 512 rows at once. One case per row count.

    `packed` lays the weight out as the engine does; the reference is the plain layer. `stock`: torch's own layer, as a control.
    """
    draw = numbers(inputs)
    plain = nn.Linear(inputs, outputs, bias=False)
    plain.weight.copy_(draw(outputs, inputs) * inputs**-0.5)
    layer = plain.to(dtype) if stock else Linear(plain.to(dtype))
    x = draw(512, inputs).to(dtype)
    want = layer(x)
    holder = nn.Sequential(layer)
    if packed and not prepack(holder):
        return
    for count in counts:
        compared = wrong = at = 0
        while compared < elements:
            if at + count > len(x):
                at = (at + 1) % count if count < len(x) else 0  # different rows are adjacent in the next round
            part = holder(x[at : at + count])
            wrong += differing(part, want[at : at + count])
            compared += part.numel()
            at += count
        yield f"{count} rows", compared, wrong


class QKV:
    """Queries [T, H, D], keys and values [T, KV, D] of one sequence."""

    def __init__(self, length: int, dtype: torch.dtype, seed: int, heads: int, kv: int, dim: int) -> None:
        draw = numbers(seed)
        self.q, self.k, self.v = (draw(length, n, dim).to(dtype) for n in (heads, kv, kv))


def attend(
    sequences: Sequence[QKV],
    pieces: Sequence[Sequence[tuple[int, int]]],
    *,
    block: int,
    window: int,
    spare: int = 0,
    seed: int = 0,
) -> list[Tensor]:
    """Attention of each sequence, its tokens computed in `pieces`: the n-th pieces of all of them form one call.

    Blocks are in random order among others filled with noise; `spare` is the number of noise blocks appended to each sequence's list.
    """
    most = max(len(s.q) for s in sequences) // block + 1 + spare
    order = torch.randperm(len(sequences) * most, generator=torch.Generator().manual_seed(seed)).tolist()
    first = sequences[0]
    held = Blocks(len(order), first.k.shape[1], block, first.k.shape[2], first.k.dtype)
    held.keys.fill_(3.0)
    held.values.fill_(-7.0)
    tables = [order[i * most : (i + 1) * most] for i in range(len(sequences))]
    out = [torch.empty_like(s.q) for s in sequences]
    for step in range(max(map(len, pieces))):
        live = [(i, *own[step]) for i, own in enumerate(pieces) if step < len(own)]
        entries = [
            PagedEntry(start=a, end=b, blocks=tables[i][: -(-b // block) + spare if spare else -(-b // block)])
            for i, a, b in live
        ]
        q, k, v = (torch.cat([getattr(sequences[i], name)[a:b] for i, a, b in live]) for name in "qkv")
        held.write(k, v, TokenPlaces.of(entries, block))
        scale = first.q.shape[-1] ** -0.5
        answer, _ = Reads(entries, block).attend(q, held, scale, window)
        for (i, a, b), part in zip(live, answer.split([b - a for _, a, b in live]), strict=True):
            out[i][a:b] = part
    return out


def cut(length: int, chunk: int, start: int = 0) -> list[tuple[int, int]]:
    """[start, length) in chunks. Example: ``cut(5, 2) == [(0, 2), (2, 4), (4, 5)]``."""
    return [(a, min(a + chunk, length)) for a in range(start, length, chunk)]


def attention(
    dtype: torch.dtype, length: int, *, window: int = 0, heads: int = 9, kv: int = 3, dim: int = 64
) -> Generator[Case]:
    """Decode, chunks, other sequences in the batch, padding, spare blocks, a shared prefix and other block sizes against one call."""
    mine = QKV(length, dtype, length, heads, kv, dim)
    others = [QKV(n, dtype, n + 5, heads, kv, dim) for n in (3, length, max(1, length // 2), 40)]
    (want,) = attend([mine], [[(0, length)]], block=32, window=window)

    def case(name: str, got: Tensor, start: int = 0) -> Case:
        return name, got[start:].numel(), differing(got[start:], want[start:])

    def alone(block: int, chunk: int, spare: int = 0) -> Tensor:
        return attend([mine], [cut(length, chunk)], block=block, window=window, spare=spare, seed=chunk)[0]

    for chunk in (1, 16, 37):
        yield case("decode" if chunk == 1 else f"chunks of {chunk}", alone(32, chunk))
    for block in (16, 64):
        yield case(f"blocks of {block}", alone(block, length))
        yield case(f"blocks of {block}, chunks of 37", alone(block, 37))
    yield case("spare blocks", alone(32, 37, spare=5))
    company = attend(
        [others[0], others[1], mine, *others[2:]],
        [cut(len(s.q), 29) for s in (others[0], others[1], mine, *others[2:])],
        block=32,
        window=window,
    )
    yield case("batch of 5", company[2])
    yield case("right padding", _padded(mine, others[1], window))
    if (half := length // 2 // 32 * 32) > 0:
        yield case("prefix hit", _prefix_hit(mine, half, window), half)


def _padded(mine: QKV, other: QKV, window: int) -> Tensor:
    """The result if 13 padding tokens follow."""
    long = object.__new__(QKV)
    long.q, long.k, long.v = (torch.cat([getattr(mine, n), getattr(other, n)[:13]]) for n in "qkv")
    return attend([long], [[(0, len(long.q))]], block=32, window=window)[0][: len(mine.q)]


def _prefix_hit(mine: QKV, half: int, window: int) -> Tensor:
    """The first `half` tokens were computed by another request, one token at a time, and only the rest is computed here."""
    return attend([mine], [[*cut(half, 1), (half, len(mine.q))]], block=32, window=window, seed=9)[0]


def log_softmax(dtype: torch.dtype, vocab: int, *, rows: int = 33) -> Generator[Case]:
    """Each row of logits alone and in the reversed batch, against the batch. One case per temperature."""
    x = (numbers(vocab)(rows, vocab) * 4).to(dtype)
    tokens = (torch.arange(rows) * (TILE + 1) % vocab).numpy()
    for temperature in (1.0, 0.7):
        t = torch.full((rows,), temperature)
        want = RowSoftmax.of(x, t).logprobs(tokens)
        alone = torch.cat([RowSoftmax.of(x[i : i + 1], t[:1]).logprobs(tokens[i : i + 1]) for i in range(rows)])
        back = RowSoftmax.of(x.flip(0), t).logprobs(tokens[::-1].copy()).flip(0)
        yield f"temperature {temperature}", 2 * rows, differing(alone, want) + differing(back, want)
