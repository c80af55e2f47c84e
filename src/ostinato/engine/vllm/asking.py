"""The body of a request to a vLLM server's token-in, token-out API."""

from __future__ import annotations

from typing import Any

from ostinato.core.generation import Generate


def token_request(request: Generate, seed: int, stop_ids: frozenset[int], salt: str) -> dict[str, Any]:
    """The JSON of a token request. Its prefix may be shared only under the same `salt`."""
    sampling = request.sampling
    edits: dict[str, Any] = {"logit_bias": {str(token): value for token, value in sampling.logit_bias}}
    edits |= {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    if sampling.grammar:
        edits["structured_outputs"] = {"grammar": sampling.grammar}
    return {
        "request_id": request.id,
        "token_ids": list(request.prompt_ids),
        "cache_salt": salt,  # vLLM keys its prefix cache by tokens and this alone
        "sampling_params": {
            "n": request.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % (1 << 63),
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,  # the renderer's stop tokens are the ones that count
            "logprobs": request.tops,  # in addition to the sampled token's
            "detokenize": bool(sampling.stop),
            **(edits if sampling.edits_logits else {}),
        },
    }
