"""The speed at which a device multiplies a model's own matrices: the time of a pass if it consisted of its matrix products alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.model.linear import linear

Shapes = Counter[tuple[int, ...]]
_CALLS = 50


@dataclass(frozen=True)
class Matrices:
    """The shapes (out, in) of the weights that tokens are multiplied with, with their counts. The head is separate: few rows reach it."""

    body: Shapes
    head: Shapes

    @classmethod
    def of(cls, model: Any) -> Matrices:
        head = model.get_output_embeddings()
        body = Counter(tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
        return cls(body=body, head=Counter([tuple(head.weight.shape)]))

    def flop(self, tokens: float, head_rows: float) -> float:
        """2 x weights x rows, forward. A backward pass is twice that. Attention is not counted."""
        return 2 * tokens * _weights(self.body) + 2 * head_rows * _weights(self.head)


def _weights(shapes: Shapes) -> int:
    return sum(count * rows * columns for (rows, columns), count in shapes.items())


def _round(rows: int) -> int:
    """Round to the nearest 32, since steps differ by a few rows."""
    return rows if rows < 32 else 32 * round(rows / 32)


def _best(work: Callable[[], Any], device: str, seconds: float = 0.25) -> float:
    """The shortest of several runs: the machine's speed without other load. On a GPU several calls are timed together, since a product may
    take less time than its launch."""
    times: list[float] = []
    end, calls = time.perf_counter() + seconds, 1 if device == "cpu" else _CALLS
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started) / calls)
    return min(times)


def seconds(shapes: Shapes, rows: int, dtype: torch.dtype, device: str = "cpu", *, backward: bool) -> float:
    """Seconds for `rows` rows through all `shapes`, with the products that a pass needs for a linear layer."""
    total = 0.0
    with torch.inference_mode():
        for (out, into), count in shapes.items():
            weight, x, grad = (
                torch.randn(shape).to(device, dtype) for shape in ((out, into), (rows, into), (rows, out))
            )
            total += count * sum(_best(product, device) for product in _products(x, weight, grad, backward=backward))
    return total


def _products(x: Tensor, weight: Tensor, grad: Tensor, *, backward: bool) -> list[Callable[[], Tensor]]:
    return [lambda: grad.mm(weight), lambda: grad.t().mm(x)] if backward else [lambda: linear(x, weight)]


class Roofline:
    """Least seconds for an amount of work, from products of the same shapes measured here. Each row count is measured once."""

    def __init__(self, matrices: Matrices, dtype: torch.dtype, device: str = "cpu") -> None:
        self._matrices, self._dtype, self._device = matrices, dtype, device
        self._known: dict[tuple[str, int, bool], float] = {}
        self.rates: dict[str, float] = {}

    def least(self, tokens: float, head_rows: float, *, rows: int, heads: int, backward: bool = False) -> float:
        """Seconds for `tokens` in passes of `rows`, of which `head_rows` reach the head in passes of `heads`."""
        rows, heads = _round(rows), _round(heads)
        body = tokens / rows * self._pass("body", rows, backward)
        return body + (head_rows / heads * self._pass("head", heads, backward) if heads else 0.0)

    def _pass(self, part: str, rows: int, backward: bool) -> float:
        key = (part, rows, backward)
        if key not in self._known:
            shapes: Shapes = getattr(self._matrices, part)
            self._known[key] = seconds(shapes, rows, self._dtype, self._device, backward=backward)
            flop = 2 * rows * _weights(shapes) * (2 if backward else 1)
            name = f"{part} {'backward' if backward else 'forward'}, {rows} rows"
            self.rates[name] = flop / self._known[key] / 1e9
        return self._known[key]
