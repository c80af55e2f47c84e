"""The engine's form of a model, made once, and the modules that are built from it: one for each version of the weights.

Building is made of short pieces, so that a version can be built beside running streams: see `Blueprint.pieces`.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.weights import WeightArray, Weights
from ostinato.engine.embedded.fused import FusedLayer, Reach, Sources, biases, fused_mlp, how_to_fuse
from ostinato.engine.embedded.packed import PackedLinear, can_pack
from ostinato.model.experts import set_rows
from ostinato.model.gated import GatedMLP
from ostinato.model.tensors import check_form, check_names, check_part, copy_part, parts_of, weights_of

Pieces = Generator[None, None, PreTrainedModel]
"""A module in the making: every `next` is a piece of the work, the module is what it returns."""


@dataclass(frozen=True, slots=True)
class _Packing:
    """What one packed layer of the form is laid out from: names of tensors, side by side in this order."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


class Blueprint:
    """How to build the engine's form of one model for any version of its weights.

    Args:
        model: an eval module of the library's, our attention in it. It becomes the form; its weights are let go.
        rows: the row rule. Layers are fused where their bits at multiples of it are the library's own.
        fuse: False leaves every layer as the library computes it.

    Example::

        blueprint = Blueprint(empty_model(path, torch.bfloat16), rows=4)
        module = blueprint.build(weights)
    """

    def __init__(self, model: PreTrainedModel, rows: int, *, fuse: bool = True) -> None:
        names: dict[int, str] = {}
        tensors: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if names.setdefault(id(tensor), name) == name:
                tensors[name] = tensor
        set_rows(model, rows)
        sources: Sources = {}
        if fuse:
            _fuse(model, rows, sources)
            _pack(model, sources)
        packings = {
            packed: _Packing(
                tuple(names[id(layer.weight)] for layer in layers), tuple(names[id(bias)] for bias in biases(layers))
            )
            for packed, layers in sources.items()
        }
        self._packings = [packings[module] for module in model.modules() if isinstance(module, PackedLinear)]
        self._tensors: Mapping[str, Tensor] = {
            name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()
        }
        self._held = _let_go(model, names)
        self._form = model

    def build(self, weights: Weights) -> PreTrainedModel:
        """A module that holds a copy of these weights. Raises BadWeights; see `model.tensors.put_weights` for what is refused."""
        pieces = self.pieces(weights)
        while True:
            try:
                next(pieces)
            except StopIteration as done:
                return done.value

    @torch.no_grad()
    def pieces(self, weights: Weights) -> Pieces:
        """`build` in pieces: none checks or copies more than some millions of elements, or lays out more than one layer."""
        check_names(self._tensors, weights)
        for name, tensor in self._tensors.items():
            check_form(name, weights[name], tensor)
        fresh = {id(tensor): _empty_like(tensor) for tensor in self._held}
        constants = {id(buffer): buffer for buffer in self._form.buffers() if id(buffer) not in fresh}
        module = copy.deepcopy(self._form, fresh | constants)
        yield
        packed = [part for part in module.modules() if isinstance(part, PackedLinear)]
        for name, array in weights.items():
            for part in parts_of(array):
                check_part(name, array, part)
                yield
        for tensor, name in self._held.items():
            for part in parts_of(weights[name]):
                copy_part(fresh[id(tensor)], weights[name], part)
                yield
        for layer, packing in zip(packed, self._packings, strict=True):
            weight = yield from self._stacked(packing.weights, weights)
            bias = (yield from self._stacked(packing.biases, weights)) if packing.biases else None
            layer.pack(weight, bias)
            yield
        return module

    def _stacked(self, names: tuple[str, ...], weights: Weights) -> Generator[None, None, Tensor]:
        """The named tensors one below another."""
        first = self._tensors[names[0]]
        rows = [len(self._tensors[name]) for name in names]
        whole = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype)
        for own, name in zip(whole.split(rows), names, strict=True):
            for part in parts_of(weights[name]):
                copy_part(own, weights[name], part)
                yield
        return whole


def prepare(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """The engine's form of a loaded model, with copies of its weights; what the self-test compares with the model itself."""
    weights = {name: WeightArray(a.dtype, a.shape, a.data.copy()) for name, a in weights_of(model).items()}
    return Blueprint(model, rows).build(weights)


def _fuse(model: PreTrainedModel, rows: int, sources: Sources) -> None:
    """Exchange the decoder layers that can be fused, each kind tried once."""
    body: Any = model.base_model
    layers, rotary = getattr(body, "layers", None), getattr(body, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return
    reaches = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    known: dict[Any, Reach | None] = {}
    for number, layer in enumerate(list(layers)):
        kind = (reaches[number], _kind(layer))
        if kind not in known:
            known[kind] = how_to_fuse(layer, rotary, rows)
        reach = known[kind]
        if reach is not None:
            layers[number] = FusedLayer(layer, reach, sources)


def _kind(layer: nn.Module) -> Any:
    """What a layer is made of; two of one kind differ in their weights only."""
    attention = getattr(layer, "self_attn", None)
    settings = tuple(getattr(attention, name, None) for name in ("scaling", "sliding_window", "head_dim"))
    parts = tuple((name, type(part)) for name, part in layer.named_modules())
    return (
        settings,
        parts,
        tuple((name, tuple(weight.shape), weight.dtype) for name, weight in layer.named_parameters()),
    )


def _pack(model: nn.Module, sources: Sources) -> None:
    """Exchange what is left: feed-forward layers outside fused ones, and single linear layers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, GatedMLP):
                setattr(parent, name, fused_mlp(child, sources))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and can_pack(child):
                packed = PackedLinear()
                sources[packed] = [child]
                setattr(parent, name, packed)


def _let_go(model: nn.Module, names: Mapping[int, str]) -> dict[Tensor, str]:
    """Put stand-ins without memory in the place of the stored tensors that are left in the form; by stand-in, the tensor's name."""
    standins: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is None or id(tensor) not in names:
                    continue
                if id(tensor) not in standins:
                    empty = torch.empty_like(tensor, device="meta")
                    standins[id(tensor)] = (
                        nn.Parameter(empty, requires_grad=False) if held is module._parameters else empty
                    )
                held[key] = standins[id(tensor)]
    return {standin: names[key] for key, standin in standins.items()}


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
