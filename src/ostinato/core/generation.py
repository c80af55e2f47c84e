"""What goes into an engine, what comes out, and what an engine can do."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import Finish, PolicyVersion, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A request to the engine: exact prompt ids, how to sample, how many samples, from which slot (a ref name: live, ...).

    `tops`: so many of the likeliest tokens are told with each sampled one.

    What an engine computed of one request's prompt may serve another request only if both have the same `cache_salt`: how long
    a prompt takes then says nothing about the prompts of others.

    `within_s`: seconds from now, after which whatever has not ended ends with `Finish.DEADLINE`, wherever it stands; 0 or less: at once.
    None: there is no such limit.

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


Tops = tuple[tuple[int, float], ...]
"""The likeliest tokens in one token's place, best first, each with its log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens as somebody else counts them: of the prompt, and of one sample's answer (its share, where only a sum is told).

    Example: ``Usage(prompt=31, answer=120.0)``
    """

    prompt: int
    answer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one sample. `finish` is set on the sample's last chunk only. `text` is what may be shown.

    `ids`, `logprobs` have one entry per token, all made by `policy`; so has `tops`, where they were asked for. Text that could still
    become part of a stop string is withheld until it cannot; a stop string itself is never shown, though its tokens are in `ids`.
    `routes` is set on the sample's last chunk only: the encoded expert ids of its prompt and sampled tokens (see `Turn.routes`).

    What a model outside says has a text, and neither ids nor a `policy`; its last chunk may have the `usage` that it counted.
    """

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy: PolicyVersion | None
    text: str
    finish: Finish | None = None
    seed: int = 0
    routes: bytes = b""
    usage: Usage | None = None
    tops: tuple[Tops, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do. `context`: the most tokens of prompt and answer together; prompt ids lie in [0, `vocab_size`).

    `scores_exactly`: `score` gives the log-probabilities that sampling the same tokens would have given, to the bit. `follows_grammars`:
    an answer can be held to a grammar.

    Example: ``Capabilities(context=8192, vocab_size=49152, scores_exactly=True, follows_grammars=True)``
    """

    context: int
    vocab_size: int
    scores_exactly: bool
    follows_grammars: bool
