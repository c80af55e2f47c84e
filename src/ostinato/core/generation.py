"""An engine's requests, its output and its capabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ostinato.core.records import Finish, PolicyVersion, Sampling
from ostinato.core.steering import Steered, Steering


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A request to the engine: exact prompt ids, how to sample, how many samples, from which slot (a ref name: live, ...).

    `tops`: the number of likeliest tokens reported with each sampled token.

    `cache_salt`: two requests may share computation for their prompts only if their salts are equal, so that the time a
    prompt takes reveals nothing about the prompts of others.

    `within_s`: seconds from now after which every unfinished sample ends with `Finish.DEADLINE`, whatever its state; 0 or less means at
    once. None means no limit.

    `paired`: the answer is compared with another version's from the same seed, so tokens are drawn such that similar distributions give the
    same one as often as possible; an engine that cannot do so ignores it.

    `steering`: how the answers are steered. An answer that must follow a grammar is not steered; an engine that cannot steer refuses.

    Example: ``Generate(id="r1", slot="live", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=64), cache_salt="acme")``
    """

    id: str
    slot: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    n: int = 1
    cache_salt: str = ""
    tops: int = 0
    within_s: float | None = None
    paired: bool = False
    steering: Steering | None = None


Tops = tuple[tuple[int, float], ...]
"""The likeliest tokens at one token's position, best first, each with its log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts reported by an outside model: the prompt's, and one sample's answer's (its share, if only a sum is reported).

    Example: ``Usage(prompt=31, answer=120.0)``
    """

    prompt: int
    answer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one sample. `finish` is set only on the sample's last chunk. `text` may be shown.

    `ids` and `logprobs` have one entry per token, all sampled by `policy`; so has `tops`, if requested. Text that could still
    become part of a stop string is withheld until it cannot; a stop string itself is never shown, though its tokens are in `ids`.
    `routes` is set only on the sample's last chunk: the encoded expert ids of its prompt and sampled tokens (see `Turn.routes`).
    `nucleus`: the ids allowed by `top_p` for each of these tokens (see `Turn.nucleus`); b"" if all were, or if the engine cannot tell.
    `steered`: the effect of the request's steering on the sample's tokens so far; None without steering.

    A chunk of an outside model has a text, but neither ids nor a `policy`; its last chunk may have the `usage` reported by the model.
    """

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy: PolicyVersion | None
    text: str
    finish: Finish | None = None
    seed: int = 0
    routes: bytes = b""
    nucleus: bytes = b""
    usage: Usage | None = None
    tops: tuple[Tops, ...] = ()
    steered: Steered | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do. `context`: the most tokens of prompt and answer together; prompt ids are in [0, `vocab_size`).

    `follows_grammars`: answers can be constrained to a grammar. `steers`: how answers can be steered: token by token under an exact cap
    ("exact"), by one bias for the whole answer with a proven bound ("static"), or not at all.

    Example: ``Capabilities(context=8192, vocab_size=49152, follows_grammars=True)``
    """

    context: int
    vocab_size: int
    follows_grammars: bool
    steers: Literal["no", "static", "exact"] = "no"
