"""FLOPs by phase, computed from a transformer's shape and the lengths of turns and batches; and the number of rollout workers for a share.

A multiply-add counts as two operations. Only matrix products are counted: projections, attention, experts, routers, the output head.
Norms, rotary embeddings, activations, softmax and embedding lookups are left out, as in the sources: Kaplan et al., arXiv 2001.08361,
section 2.1 (2N operations per token forward, 4N backward, plus attention, which grows with the context), and the PaLM paper, arXiv
2204.02311, appendix B.

"A third on inference" was published in two senses: sampling takes a third of all compute; or sampling takes a third of what training takes
(one forward pass against the equivalent of three), which is a quarter of both together. The ledger reports both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.core.errors import BadConfig

# ---------------------------------------------------------------- operations of a transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Operations of one forward pass, over all layers.

    `body` is per token, `head` per position whose next token is scored or sampled, `pair` per pair of a query and a key it attends to.

    Example: ``TokenWork(body=6, head=2, pair=4).forward(tokens=10, pairs=55, scored=1) == 282``
    """

    body: float
    head: float
    pair: float

    def forward(self, tokens: float, pairs: float, scored: float) -> float:
        """Return the operations of a forward pass over these numbers of tokens, query-key pairs and scored positions."""
        return self.body * tokens + self.pair * pairs + self.head * scored


def causal_pairs(new: float, before: float = 0.0) -> float:
    """Return the number of query-key pairs under causal attention, the diagonal included, for `new` tokens after `before` cached ones.

    Example: ``causal_pairs(3) == 6``; ``causal_pairs(1, 9) == 10``
    """
    return new * before + new * (new + 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The shape of a decoder with equal layers: grouped-query attention, then a gated MLP of three matrices, or experts of three each.

    `mlp` is the width of the MLP or of one expert, `shared` the total width of the shared experts, which process every token. `experts` is
    0 for a dense model.

    Example: SmolLM2-135M is ``Decoder(layers=30, hidden=576, heads=9, kv_heads=3, head_size=64, mlp=1536, vocabulary=49152)``, with
    ``token_work().body == 2 * 106_168_320``.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    shared: int = 0

    def token_work(self) -> TokenWork:
        """Return the operations per token. Only the experts that a token is routed to count; the router counts in full."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        used = self.experts_per_token if self.experts else 1
        mlp = 3 * self.hidden * (used * self.mlp + self.shared) + self.hidden * self.experts
        return TokenWork(
            body=2.0 * self.layers * (attention + mlp),
            head=2.0 * self.hidden * self.vocabulary,
            pair=pair_work(self.layers, self.heads, self.head_size),
        )


def pair_work(layers: int, heads: int, head_size: int) -> float:
    """Return the operations per query-key pair: a dot product and a weighted sum in each head of each layer."""
    return 4.0 * layers * heads * head_size


SUPPORTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "olmoe", "qwen3_moe"})
"""Values of `model_type` in config.json whose layers match `Decoder`."""


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """Return the shape that a model's `config.json` describes. Raises BadConfig for an unsupported architecture or a missing field.

    Example: ``decoder_of(json.loads((model / "config.json").read_text())).token_work()``
    """
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise BadConfig(
            f"model_type: operations of {kind!r} cannot be counted; {', '.join(sorted(SUPPORTED))} are supported"
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise BadConfig("mlp_only_layers: operations of a model whose layers differ cannot be counted")

    def read(*names: str) -> int:
        for name in names:
            if config.get(name) is not None:
                return int(config[name])
        raise BadConfig(f"{names[0]}: missing in the model's config.json")

    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    heads, hidden = read("num_attention_heads"), read("hidden_size")
    return Decoder(
        layers=read("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=read("num_key_value_heads", "num_attention_heads"),
        head_size=int(config.get("head_dim") or hidden // heads),
        mlp=read("moe_intermediate_size", "intermediate_size") if experts else read("intermediate_size"),
        vocabulary=read("vocab_size"),
        experts=experts,
        experts_per_token=read("num_experts_per_tok") if experts else 0,
    )


# ---------------------------------------------------------------- operations by phase


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLedger:
    """Operations spent so far, by phase. `prefill` and `decode` exclude evaluation.

    Example: ``OperationLedger(prefill=1e12, decode=1e12, forward=2e12, backward=4e12).of_all == 0.25``
    """

    prefill: float = 0.0
    decode: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    evaluation: float = 0.0

    @property
    def sampling(self) -> float:
        """Operations of sampling: prefill and decode."""
        return self.prefill + self.decode

    @property
    def training(self) -> float:
        """Operations of training: forward and backward."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """Operations of all phases, including evaluation."""
        return self.sampling + self.training + self.evaluation

    @property
    def of_all(self) -> float:
        """Sampling as a share of all operations (the first sense). 0 if nothing was spent."""
        return self.sampling / self.total if self.total else 0.0

    @property
    def per_training(self) -> float | None:
        """Sampling operations per training operation (the second sense). None before the first step."""
        return self.sampling / self.training if self.training else None

    def served(self, work: TokenWork, prompt: int, cached: int, answer: int, *, evaluation: bool) -> OperationLedger:
        """Return the ledger with one more turn.

        Prefill covers the prompt after its `cached` tokens and yields the first token's logits; each further token takes one decode pass.
        """
        new, rest = prompt - cached, max(0, answer - 1)
        prefill = work.forward(new, causal_pairs(new, cached), 1 if answer else 0)
        decode = work.forward(rest, causal_pairs(rest, prompt), rest)
        if evaluation:
            return replace(self, evaluation=self.evaluation + prefill + decode)
        return replace(self, prefill=self.prefill + prefill, decode=self.decode + decode)

    def stepped(self, work: TokenWork, turns: Iterable[tuple[int, int, int]]) -> OperationLedger:
        """Return the ledger with one more optimizer step.

        `turns`: (prompt tokens, of these shared with another turn of the step, answer tokens). Only answers are scored. The backward pass
        takes twice the forward operations, as each matrix product needs gradients for both factors; nothing is recomputed.
        """
        forward = 0.0
        for prompt, shared, answer in turns:
            new = prompt - shared + answer
            forward += work.forward(new, causal_pairs(new, shared), answer)
        return replace(self, forward=self.forward + forward, backward=self.backward + 2 * forward)


# ---------------------------------------------------------------- rollout workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRules:
    """The controller's settings: sampling should get `share` of the operations of all workers, including borrowed ones.

    A gap below `slack` workers changes nothing (hysteresis), and one decision moves at most `moves` workers.

    Example: ``ShareRules(share=1 / 3)``
    """

    share: float = 1 / 3
    slack: float = 0.75
    moves: int = 4


def rollout_workers(rules: ShareRules, workers: int, least: int, most: int, observed: float) -> int:
    """Return the target number of rollout workers, given `workers` now and sampling's `observed` share of all operations.

    The model: sampling's operations grow with the number of rollout workers, and training's do not. So the number is scaled by the ratio of
    the odds of the target share to the observed odds. If something else limits sampling (turns ready for the trainer, or the engine), the
    number ends at `most` or `least`.

    Example: ``rollout_workers(ShareRules(share=0.5), 2, 1, 8, observed=1 / 3) == 4``
    """
    clipped = min(max(observed, 1e-3), 1 - 1e-3)
    wanted = max(1, workers) * (rules.share / (1 - rules.share)) / (clipped / (1 - clipped))
    gap = min(float(most), max(float(least), wanted)) - workers
    if abs(gap) < rules.slack and least <= workers <= most:
        return workers
    return min(most, max(least, workers + max(-rules.moves, min(rules.moves, round(gap)))))
