"""Rules shared by all engines: request validation and admission control, text per token, prefix-cache keys, and swap pause statistics."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from hashlib import blake2b
from typing import Literal

import numpy as np

from ostinato.core.errors import BadRequest, NotFound, Overloaded, TooLarge
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, Sampling
from ostinato.core.steering import Steering
from ostinato.model.stream import TextStream

Steers = Literal["no", "static", "exact"]

MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_TOPS = 20
MAX_TOPS_OF_ALL = 128  # per position, summed over the n answers: all stay in memory until the answers are sent
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024


def check_request(request: Generate, *, context: int, vocab_size: int, steers: Steers = "no") -> None:
    """Validate a request; refuse one that the engine can never serve, however idle it is.

    Args:
        request: the request.
        context: the model's context length: the most tokens of a prompt and its answer together.
        vocab_size: prompt ids must lie in [0, vocab_size).
        steers: how the engine can steer answers (`Capabilities.steers`).

    Raises:
        TooLarge: the prompt fills the context, or n is above `MAX_SAMPLES`.
        BadRequest: any other field out of range; `field` names it as the HTTP API does.
    """
    length = len(request.prompt_ids)
    if length == 0:
        raise BadRequest("The prompt has no tokens; send at least one.", field="messages")
    if length >= context:
        raise TooLarge(f"The prompt has {length} tokens; this model holds {context} with the answer.", field="messages")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        raise BadRequest(f"A prompt token id lies outside [0, {vocab_size}).", field="messages")
    if request.n < 1:
        raise BadRequest(f"n is {request.n}; it must be at least 1.", field="n")
    if request.n > MAX_SAMPLES:
        raise TooLarge(f"n is {request.n}; at most {MAX_SAMPLES} samples are made per request.", field="n")
    if not 0 <= request.tops <= MAX_TOPS or request.tops * request.n > MAX_TOPS_OF_ALL:
        raise BadRequest(
            f"top_logprobs is {request.tops}; send 0 to {MAX_TOPS}, and at most {MAX_TOPS_OF_ALL} with n answers.",
            field="top_logprobs",
        )
    if request.within_s is not None and math.isnan(request.within_s):
        raise BadRequest("within_s is not a number; send seconds, or leave it out.", field="within_s")
    _check_sampling(request.sampling, vocab_size)
    if request.steering is not None:
        _check_steering(request.steering, vocab_size, request.sampling, steers=steers)
    if length + request.sampling.max_tokens > context:
        raise BadRequest(
            f"{length} prompt tokens and max_tokens={request.sampling.max_tokens} exceed the context of {context}; "
            f"ask for at most {context - length}.",
            field="max_tokens",
        )


def check_loaded(slot: str, loaded: Collection[str]) -> None:
    """Raise NotFound unless a policy is loaded in the slot."""
    if slot not in loaded:
        raise NotFound(f"No policy is loaded in slot {slot!r}; loaded: {sorted(loaded)}.", field="model")


def check_score(ids: Sequence[int], start: int, *, most: int, vocab_size: int) -> None:
    """Validate a request to score ids[start:]; refuse one that the engine can never serve.

    Raises:
        TooLarge: there are more than `most` ids.
        BadRequest: `start` lies outside [1, len(ids)], or an id lies outside [0, vocab_size).
    """
    if not 1 <= start <= len(ids):
        raise BadRequest(f"start is {start}; it must lie in [1, {len(ids)}].", field="start")
    if len(ids) > most:
        raise TooLarge(f"{len(ids)} tokens exceed the context: at most {most} can be scored.", field="ids")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadRequest(f"A token id lies outside [0, {vocab_size}).", field="ids")


def check_room(samples: int, running: int, most: int) -> None:
    """Admission control: raise Overloaded if `samples` more beside the `running` ones would exceed `most`, TooLarge if they never fit."""
    if samples > most:
        raise TooLarge(f"n is {samples}, and engine.max_waiting lets {most} samples be open at once.", field="n")
    if running + samples > most:
        raise Overloaded(f"The engine is overloaded: {running} samples are open, of {most}; try again later.")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    if sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens is {sampling.max_tokens}; it must be at least 1.", field="max_tokens")
    if sampling.temperature != 0.0 and not 0.001 <= sampling.temperature <= 100.0:  # logits / 1e-38 would overflow
        raise BadRequest(f"temperature is {sampling.temperature}; send 0 or 0.001 to 100.", field="temperature")
    if not 0.0 < sampling.top_p <= 1.0:
        raise BadRequest(f"top_p is {sampling.top_p}; it must lie in (0, 1].", field="top_p")
    if len(sampling.stop) > MAX_STOPS or "" in sampling.stop:
        raise BadRequest(f"stop takes at most {MAX_STOPS} strings, none of them empty.", field="stop")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= getattr(sampling, name) <= MAX_PENALTY:
            raise BadRequest(f"{name} is {getattr(sampling, name)}; it must lie in [-2, 2].", field=name)
    if len(sampling.logit_bias) > MAX_BIASES:
        raise BadRequest(f"logit_bias takes at most {MAX_BIASES} tokens.", field="logit_bias")
    for token, value in sampling.logit_bias:
        if not 0 <= token < vocab_size or not -MAX_BIAS <= value <= MAX_BIAS:
            raise BadRequest(
                f"logit_bias takes token ids in [0, {vocab_size}) and values in [-100, 100], not {token}: {value}.",
                field="logit_bias",
            )


def _check_steering(asked: Steering, vocab_size: int, sampling: Sampling, *, steers: Steers) -> None:
    if steers == "no":
        raise BadRequest(
            "This engine cannot steer answers; use the embedded one, or send no steering.", field="steering"
        )
    basis, dials = asked.basis, np.array(asked.dials, np.float64)
    if len(dials) != len(basis.names):
        raise BadRequest(
            f"steering.dials are {len(dials)}; the basis {basis.hash} takes {len(basis.names)}.", field="steering"
        )
    if not (np.isfinite(dials) & (dials == dials.astype(np.float32))).all():
        raise BadRequest(
            "steering.dials must be finite float32 values; round them before they are sent.", field="steering"
        )
    if basis.tokens_M[-1] >= vocab_size:
        raise BadRequest(
            f"steering.basis names a token outside [0, {vocab_size}); fit it to this model.", field="steering"
        )
    biased = len({token for token, _ in sampling.logit_bias}.union(basis.tokens_M.tolist()))
    if steers == "static" and biased > MAX_BIASES:
        raise BadRequest(
            f"steering.basis and logit_bias name {biased} tokens; this engine steers by biases, {MAX_BIASES} at most.",
            field="steering",
        )
    if not (0.0 < asked.cap < math.inf and 0.0 <= asked.budget < math.inf):
        raise BadRequest(
            f"steering.cap is {asked.cap} and steering.budget {asked.budget}; send finite nats, the cap above 0.",
            field="steering",
        )


# ---------------------------------------------------------------- text


def shown(stream: TextStream, token: int, stop_ids: Set[int], *, last: bool) -> tuple[str, Finish | None]:
    """Feed one sampled token to the answer's text stream; return the text that may be shown now, and the finish reason if the answer ends.

    `last`: the token uses up `max_tokens`. A stop token ends the answer and adds no text. No part of a stop string is shown.
    """
    if token in stop_ids:
        return stream.flush(), Finish.STOP
    text = stream.feed((token,))
    finish: Finish | None = None
    if last and not stream.stopped:
        text, finish = text + stream.flush(), Finish.LENGTH
    return text, Finish.STOP if stream.stopped else finish


# ---------------------------------------------------------------- prefix cache


def prefix_key(policy: str, salt: str) -> bytes:
    """Return the 16-byte prefix-cache key of a policy's hash and a cache salt. Only requests with equal keys may share cached prefixes.

    Example: ``prefix_key("9f2c", "acme") != prefix_key("9f2c", "evil")``
    """
    return blake2b(len(policy).to_bytes(4, "little") + policy.encode() + salt.encode(), digest_size=16).digest()


# ---------------------------------------------------------------- swap pauses


def pause_stats(pauses: Sequence[float]) -> dict[str, float]:
    """Return the last, the median and the 99th percentile of the pauses at weight swaps, in seconds; 0 before the first swap."""
    ordered = sorted(pauses) or [0.0]
    return {
        "last_pause_s": pauses[-1] if pauses else 0.0,
        "pause_p50_s": ordered[len(ordered) // 2],
        "pause_p99_s": ordered[len(ordered) * 99 // 100],
    }
