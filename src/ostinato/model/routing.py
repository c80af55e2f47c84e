"""Router replay: the routers' choices of experts are recorded in the engine's forward pass and replayed in the trainer's.

It works by forward hooks on the router modules; no module is replaced. Replay fixes the expert ids only: gates are recomputed from the
live router logits, so gradients reach the router (as in R3, arXiv 2510.11370). Layers are looked up by index, not by a cursor, so
activation checkpointing, which recomputes layers in the backward pass, finds the same routes again.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ostinato.core.errors import BadConfig, BadRoutes
from ostinato.model.experts import experts_of
from ostinato.model.portable import PortableOperations

_ATTRIBUTE = "ostinato_routing"


class Recording:
    """The routers' choices in the last call of `hidden` inside `Routing.record()`."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._ids: list[Tensor | None] = [None] * routing.layers

    def ids_NLk(self) -> Tensor:
        """Return the chosen ids [N, L, k], each set ascending: uint8 up to 256 experts, int16 up to 32768, else int32.

        Raises BadRoutes if a router was not called.
        """
        if any(ids is None for ids in self._ids):
            absent = [layer for layer, ids in enumerate(self._ids) if ids is None]
            raise BadRoutes(f"the routers of layers {absent} were not called inside the context", reason="missing")
        stacked = torch.stack(cast("list[Tensor]", self._ids), 1)
        return stacked.sort(dim=-1).values.to(_narrow(self._routing.experts))

    def route(self, layer: int, logits: Tensor, scores: Tensor, live: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a replacement for one router's (scores, ids); None leaves them as they are."""
        self._ids[layer] = live
        return None


class Replay(Recording):
    """A replay in progress; its `ids_NLk` are the ids in use, after the plausibility filter.

    Counts are over (token, layer) pairs with a recorded choice. `routed`: all of them; `flips`: those with a different live choice;
    `implausible`: those in which the filter restored the live choice. Recomputed layers are counted once.
    """

    def __init__(self, routing: Routing, ids_NLk: Tensor, plausible: float | None) -> None:
        super().__init__(routing)
        self._wanted_LNk = ids_NLk.transpose(0, 1).contiguous()
        self._known_LN = self._wanted_LNk[..., 0] >= 0
        self._plausible = plausible
        self._flips: dict[int, Tensor] = {}
        self._implausible: dict[int, Tensor] = {}

    @property
    def routed(self) -> int:
        return int(self._known_LN.sum())

    @property
    def flips(self) -> int:
        return sum(int(count) for count in self._flips.values())

    @property
    def implausible(self) -> int:
        return sum(int(count) for count in self._implausible.values())

    def route(self, layer: int, logits: Tensor, scores: Tensor, live: Tensor) -> tuple[Tensor, Tensor] | None:
        wanted, known = self._wanted_LNk[layer].to(live.device), self._known_LN[layer].to(live.device)
        if len(live) != len(wanted):
            raise BadRoutes(f"routes of {len(wanted)} tokens were given for a call of {len(live)}", reason="stale")
        ids = live.sort(dim=-1).values
        self._flips[layer] = (known & (ids != wanted).any(-1)).sum()
        if self._plausible is not None:
            doubtful = self._doubtful(logits.detach(), live, wanted.clamp(min=0)) & known
            self._implausible[layer] = doubtful.sum()
            known = known & ~doubtful
        ids = torch.where(known.unsqueeze(-1), wanted, ids)
        self._ids[layer] = ids
        return cast("_Recipe", self._routing.recipe).gates(logits, ids)

    def _doubtful(self, logits: Tensor, live: Tensor, wanted: Tensor) -> Tensor:
        """Return [N]: whether any recorded expert has less than `plausible` times the probability of the least likely live choice."""
        probabilities = torch.softmax(logits, -1, dtype=torch.float32)
        last_live = probabilities.gather(-1, live).amin(-1)
        return probabilities.gather(-1, wanted).amin(-1) < cast("float", self._plausible) * last_live


class Routing:
    """The routers of one model. `layers`: the number of layers with a router; `experts` and `top_k`: of each router.

    Each context (`record`, `replay`) serves exactly one call of `hidden`, and two threads must not use them at once. Example:
    ``with routing.record() as seen: hidden(...)`` then ``seen.ids_NLk()``.
    """

    def __init__(self, routers: list[nn.Module], recipe: _Recipe | None, problem: str | None) -> None:
        first = cast("Any", routers[0]) if routers else None
        self.layers = len(routers)
        self.experts: int = first.num_experts if first else 0
        self.top_k: int = first.top_k if first else 0
        self.recipe = recipe
        self.problem = problem
        self._session: Recording | None = None
        self._replayed = [False] * len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_hook(_Hook(self, layer))

    @property
    def can_record(self) -> bool:
        return self.problem is None

    @property
    def can_replay(self) -> bool:
        return self.can_record and self.recipe is not None

    @contextmanager
    def record(self) -> Generator[Recording]:
        """Record the routers' choices. Raises BadConfig for routers that do not return them."""
        if self.problem is not None:
            raise BadConfig(self.problem)
        session = Recording(self)
        with self._open(session):
            yield session

    @contextmanager
    def replay(self, ids_NLk: Tensor | NDArray[np.integer], plausible: float | None = None) -> Generator[Replay]:
        """Make the routers choose `ids_NLk` [N, L, k] (any integer type and order) in the call of `hidden` inside.

        The live choice stays for a set of -1s, and for all tokens of the call after the first N. With `plausible` r, it also stays for a
        set with an expert whose live probability is below r times that of the least likely expert chosen live. If activations are
        recomputed, keep the context open through the backward pass. Raises BadRoutes (routes that do not fit, or a router that was never
        called) and BadConfig (the gates of this kind of router cannot be recomputed bit for bit).
        """
        if self.problem is not None or self.recipe is None:
            raise BadConfig(
                self.problem
                or "the gates of this kind of router cannot be recomputed bit for bit, so routes cannot be replayed: "
                "switch router replay off for this model"
            )
        ids = ids_NLk if isinstance(ids_NLk, Tensor) else torch.from_numpy(ids_NLk.astype(np.int64))
        session = Replay(self, self._checked(ids), plausible)
        with self._open(session):
            yield session
        session.ids_NLk()  # raises if a layer did not use its routes

    def hooked(self, layer: int, output: Any) -> Any:
        """Return what a router's forward must return instead of `output`, or None to leave it."""
        if self._session is None:
            if self._replayed[layer] and _in_backward():
                raise BadRoutes(
                    "activations are recomputed after `replay` was closed: close it after the backward pass",
                    reason="missing",
                )
            self._replayed[layer] = False
            return None
        self._replayed[layer] = isinstance(self._session, Replay)
        answer = self._session.route(layer, *output)
        return None if answer is None else (output[0], *answer)

    @contextmanager
    def _open(self, session: Recording) -> Generator[None]:
        if self._session is not None:
            raise RuntimeError("this model's routes are being recorded or replayed already")
        self._session = session
        try:
            yield
        finally:
            self._session = None

    def _checked(self, ids_NLk: Tensor) -> Tensor:
        if ids_NLk.dim() != 3 or ids_NLk.is_floating_point() or ids_NLk.numel() == 0:
            raise BadRoutes(
                f"routes must be integers [tokens, layers, k], not {tuple(ids_NLk.shape)}", reason="missing"
            )
        shape = (self.layers, self.top_k)
        if tuple(ids_NLk.shape[1:]) != shape:
            raise BadRoutes(
                f"routes of {tuple(ids_NLk.shape[1:])} layers and slots for a model of {shape}", reason="stale"
            )
        ids = ids_NLk.long().sort(dim=-1).values
        unknown = (ids == -1).all(-1)
        if ids.max() >= self.experts or ((ids < 0).any(-1) & ~unknown).any():
            raise BadRoutes(f"the routes name experts that do not exist (0 to {self.experts - 1} do)", reason="stale")
        repeated = (ids[..., 1:] == ids[..., :-1]).any(-1) & ~unknown
        if repeated.any():
            zero = bool((ids == 0).all(-1).any()) and self.top_k > 1
            raise BadRoutes(
                "a token has routes of zeros: nothing was recorded for it"
                if zero
                else "a token goes to the same expert twice",
                reason="zero" if zero else "repeated",
            )
        return ids


@dataclass(frozen=True)
class _Hook:
    """A router's forward hook: an object, not a closure, so that copying a model copies the hook with it."""

    routing: Routing
    layer: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.routing.hooked(self.layer, output)


@dataclass(frozen=True)
class _Recipe:
    """How a softmax router computes gates from logits and ids."""

    normalised: bool  # a token's gates sum to 1
    narrowed: bool  # gates are rounded to the dtype of the logits
    portable: bool  # computed by our own operations

    def gates(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return gates and ids in descending order of probability, the order in which the router adds its normalising sum."""
        with PortableOperations() if self.portable else nullcontext():
            probabilities = torch.softmax(logits, -1, dtype=torch.float32)
            values, order = probabilities.gather(-1, ids).topk(ids.shape[-1], dim=-1)
            if self.normalised:
                values = values / values.sum(dim=-1, keepdim=True)
        return values.to(logits.dtype) if self.narrowed else values, ids.gather(-1, order)


_RECIPES = [
    _Recipe(normalised, narrowed, portable)
    for normalised in (True, False)
    for narrowed in (True, False)
    for portable in (True, False)
]


def install(model: nn.Module) -> Routing | None:
    """Install routing hooks on `model` on the first call, and return its `Routing`; None for a dense model.

    Each kind of router is tried on random weights and inputs, in float32 and bfloat16, so the model's own weights are not needed. The
    recipe for gates is the one that reproduces the router's own bits. `Routing.problem` says why routes cannot be recorded.
    """
    if (known := of(model)) is not None:
        return known
    experts = experts_of(model)
    if not experts:
        return None
    routers = [module for module in model.modules() if _looks_like_router(module)]
    recipe, problem = _examine(routers, len(experts))
    routing = Routing([] if problem else routers, recipe, problem)
    setattr(model, _ATTRIBUTE, routing)
    return routing


def of(model: nn.Module) -> Routing | None:
    """Return the `Routing` that `install` made for this model, or None."""
    return cast("Routing | None", getattr(model, _ATTRIBUTE, None))


def _looks_like_router(module: nn.Module) -> bool:
    weight, experts = getattr(module, "weight", None), getattr(module, "num_experts", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) == experts and hasattr(module, "top_k")


def _examine(routers: list[nn.Module], expected: int) -> tuple[_Recipe | None, str | None]:
    """Return (recipe, problem) of a model's routers; each may be None."""
    if len(routers) != expected:
        return (
            None,
            f"{len(routers)} routers were found for {expected} experts layers: routes of this model cannot be recorded",
        )
    kinds: dict[Any, nn.Module] = {}
    for router in routers:
        known = cast("Any", router)
        shape = tuple(known.weight.shape)
        kinds[type(router), shape, known.top_k, getattr(router, "norm_topk_prob", None)] = router
    if len({(shape[0], top_k) for _, shape, top_k, _ in kinds}) > 1:
        return None, "routers differ in experts or top_k from layer to layer: routes of this model cannot be recorded"
    fitting = set(_RECIPES)
    for router in kinds.values():
        try:
            trials = [_trial(cast("Any", router), dtype) for dtype in (torch.float32, torch.bfloat16)]
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            return None, f"{type(router).__name__} does not tell what it chose ({error}): its routes cannot be recorded"
        fitting &= {recipe for recipe in _RECIPES if all(_fits(recipe, *trial) for trial in trials)}
    return next((recipe for recipe in _RECIPES if recipe in fitting), None), None


@torch.no_grad()
def _trial(router: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's (logits, scores, ids) for random weights and 64 random tokens."""
    source = torch.Generator().manual_seed(0)
    device, width = router.weight.device, router.weight.shape[1]

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=source) * scale).to(device, dtype)

    drawn = {
        name: draw(*tensor.shape, scale=2 * width**-0.5)
        for name, tensor in (*router.named_parameters(), *router.named_buffers())
        if tensor.is_floating_point()
    }
    logits, scores, ids = torch.func.functional_call(router, drawn, (draw(64, width),))
    expected = (64, router.top_k)
    if (
        logits.shape != (64, router.num_experts)
        or scores.shape != expected
        or ids.shape != expected
        or ids.is_floating_point()
    ):
        raise ValueError("its answer is not (logits, scores, ids)")
    return logits, scores, ids


def _fits(recipe: _Recipe, logits: Tensor, scores: Tensor, ids: Tensor) -> bool:
    # ties may come in another order, but their gates are equal too
    gates, _ = recipe.gates(logits, ids.sort(dim=-1).values)
    return gates.dtype == scores.dtype and torch.equal(gates, scores)


def _in_backward() -> bool:
    # not a public API, but torch's checkpointing uses it too
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _narrow(experts: int) -> torch.dtype:
    if experts <= 256:
        return torch.uint8
    return torch.int16 if experts <= 1 << 15 else torch.int32
