"""A fake vLLM server that also makes tokens: `FakeVllm` with the routes of vLLM's token-in, token-out API, and no model behind them.

The refusals, the shape of every answer, when a pause holds the streams, and how an answer reports the weights' versions
follow vLLM (0.32, `entrypoints/scale_out/token_in_token_out`). The tokens are a script's bytes.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from tests.fakes.vllm import FakeVllm

from ostinato.testing.engine import STOP_ID, decode, encode
from ostinato.weights.follow.staging import Staged

_KNOWN = {
    *("n", "max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs"),
    *("prompt_logprobs", "detokenize", "presence_penalty", "frequency_penalty", "logit_bias", "structured_outputs"),
}
_FORBIDDEN = frozenset("@/\\\x00")  # in a cache salt


class AnyVersion:
    """Stands in for `Staging`: every version is ready at once."""

    def __init__(self) -> None:
        self._root = ""

    def stage(self, root: str) -> Staged:
        self._root = root
        return self.status()

    def status(self) -> Staged:
        return Staged(root=self._root, state="ready", error="", seconds=0.0)

    def take(self, root: str) -> None:
        assert root == self._root


class TokenVllm(FakeVllm):
    """Answers every prompt with `script`'s bytes and `STOP_ID`.

    `requests` are the bodies seen, `open` the number of requests in progress, `cached` the prompts found in the prefix cache, `slow_s`
    the seconds per token, `seats` limits the requests that get tokens at once while the others wait, `held` lets nothing go on.
    `cut_after = k` breaks each stream's connection after k events, `twice` sends each stream's events a second time.
    `routes` gives the expert ids [tokens, layers, k] of a sample, by its index and computed tokens, or text to send in their place.
    `logits` gives the row of logits at each place of an answer, from which log-probabilities are made as vLLM processes them. `lie`
    is a false version to report, and `forget()` simulates a restart with the initial weights.

    Example::

        fake = TokenVllm("an answer")
        async with serving(fake.app) as url: ...
    """

    def __init__(
        self, script: str, *, context: int = 512, mode: str = "processed_logprobs", backend: str = "guidance"
    ) -> None:
        super().__init__(AnyVersion())  # pyright: ignore[reportArgumentType]
        self.script, self.context, self.mode, self.backend = script, context, mode, backend
        self.slow_s, self.cut_after, self.lie, self.twice, self.held = 0.0, -1, "", False, False
        self.requests: list[dict[str, Any]] = []
        self.logits: Callable[[int], NDArray[np.float32]] | None = None
        self.routes: Callable[[int, int], NDArray[np.integer] | str] | None = None
        self.open = 0
        self.seats: asyncio.Semaphore | None = None
        self.cached: list[tuple[int, ...]] = []
        self._prefixes: set[tuple[str | None, tuple[int, ...]]] = set()
        self.device, self.version, self.gpu = "cuda", "0.32.0", "NVIDIA H100"
        self.app.routes[:0] = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/server_info", self._server_info),
            Route("/version", lambda request: JSONResponse({"version": self.version})),
        ]

    def forget(self) -> None:
        """Reset the state as after a restart."""
        self.label, self.active, self.paused = "default", False, False
        self.staging = AnyVersion()  # pyright: ignore[reportAttributeAccessIssue]
        self.served = [""] * len(self.served)
        self._prefixes.clear()

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "model", "max_model_len": self.context}]})

    async def _server_info(self, request: Request) -> JSONResponse:
        config = {
            "model_config": {"logprobs_mode": self.mode, "dtype": "torch.bfloat16", "quantization": None},
            "structured_outputs_config": {"backend": self.backend},
            "device_config": {"device": self.device},
            "scheduler_config": {"enable_chunked_prefill": True},
            "aux_output_config": {"enable_return_routed_experts": self.routes is not None},
        }
        system = {"torch_version": "2.13.0", "nvidia_gpu_models": self.gpu}
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": system})

    async def _generate(self, request: Request) -> JSONResponse | StreamingResponse:
        body = await request.json()
        if self.down:
            return JSONResponse({"error": {"message": "down"}}, 503)
        if refusal := _refusal(body):
            return JSONResponse({"error": {"message": refusal, "type": "BadRequestError", "code": 400}}, 400)
        self.requests.append(body)
        key = (body.get("cache_salt"), tuple(body["token_ids"]))
        if key in self._prefixes:
            self.cached.append(key[1])
        self._prefixes.add(key)
        if body.get("stream"):
            return StreamingResponse(self._stream(body), media_type="text/event-stream")
        self.open += 1
        try:
            while self.held:
                await asyncio.sleep(0.001)
        finally:
            self.open -= 1
        scored = [None, *({str(token): {"logprob": logprob(token), "rank": 1}} for token in body["token_ids"][1:])]
        return JSONResponse({"request_id": "r", "choices": [], "prompt_logprobs": scored})

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        sampling = body["sampling_params"]
        events = 0
        self.open += 1
        seats = None
        try:
            if self.seats is not None:
                await self.seats.acquire()
                seats = self.seats
            for _ in range(2 if self.twice else 1):
                samples = [_Sample(index, sampling, self.logits) for index in range(sampling.get("n", 1))]
                for token in [*encode(self.script), STOP_ID]:
                    await asyncio.sleep(self.slow_s)
                    while self.paused or self.held:
                        await asyncio.sleep(0.001)
                    for sample in samples:
                        if sample.finish is None:
                            if events == self.cut_after:
                                raise ConnectionResetError
                            events += 1
                            event = sample.step(token, self.label, self.lie)
                            if sample.finish and self.routes is not None:
                                computed = len(body["token_ids"]) + sample.length - 1
                                event["choices"][0]["routed_experts"] = npy(self.routes(sample.index, computed))
                            yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            if seats is not None:
                seats.release()
            self.open -= 1


class _Sample:
    def __init__(
        self, index: int, sampling: dict[str, Any], logits: Callable[[int], NDArray[np.float32]] | None
    ) -> None:
        self.index, self._sampling, self._logits = index, sampling, logits
        self._ids: list[int] = []
        self._versions: list[str] = []
        self.finish: str | None = None

    @property
    def length(self) -> int:
        return len(self._ids)

    def step(self, token: int, label: str, lie: str) -> dict[str, Any]:
        value = logprob(token)
        if self._logits is not None:
            value = float(processed(self._logits(len(self._ids)), self._sampling, self._ids)[token])
        self._ids.append(token)
        self._versions.append(label)
        if token in self._sampling["stop_token_ids"] or _holds(self._ids, self._sampling.get("stop", [])):
            self.finish = "stop"
        elif len(self._ids) == self._sampling["max_tokens"]:
            self.finish = "length"
        # the sampled token first, whatever its rank, then the best ones
        others = [
            {"token_id": token + i, "logprob": logprob(token) / (i + 1)}
            for i in range(1, self._sampling["logprobs"] + 1)
        ]
        own = {"token_id": token, "logprob": value}
        entry = {**own, "rank": 1, "top_logprobs": [own, *reversed(others)] if others else []}
        choice = {
            "index": self.index,
            "finish_reason": self.finish,
            "stop_reason": None,
            "token_ids": [token],
            "logprobs": {"content": [entry]},
            "weight_versions": spans([lie or version for version in self._versions]) if self.finish else None,
        }
        return {"request_id": "r", "choices": [choice]}


def processed(logits_V: NDArray[np.float32], sampling: dict[str, Any], before: Sequence[int]) -> NDArray[np.float64]:
    """The log-probabilities of `--logprobs-mode processed_logprobs`, in the order of vLLM's sampler (0.32, `v1/sample/sampler.py`): biases,
    penalties for the answer's tokens, temperature (1 if greedy), top-p (none if greedy), and then the softmax.
    """
    row_V = logits_V.astype(np.float64)
    for token, bias in sampling.get("logit_bias", {}).items():
        row_V[int(token)] += bias
    counts_V = np.bincount(np.asarray(before, np.int64), minlength=len(row_V))
    row_V -= sampling.get("frequency_penalty", 0.0) * counts_V + sampling.get("presence_penalty", 0.0) * (counts_V > 0)
    row_V /= sampling["temperature"] or 1.0
    mass_V = np.exp(row_V - row_V.max())
    mass_V /= mass_V.sum()
    order = np.argsort(mass_V)  # the least likely first, as long as they are within 1 - top_p
    out = order[np.cumsum(mass_V[order]) <= 1.0 - (sampling["top_p"] if sampling["temperature"] else 1.0)]
    mass_V[out[:-1] if len(out) == len(order) else out] = 0.0
    with np.errstate(divide="ignore"):
        return np.log(mass_V / mass_V.sum())


def spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Runs of equal versions as vLLM reports them."""
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if not found or found[-1]["version"] != version:
            found.append({"version": version, "start": at, "end": at})
        found[-1]["end"] = at + 1
    return found


def npy(routes: NDArray[np.integer] | str) -> str:
    """Routes as vLLM sends them: an .npy file in base64. Text is sent as it is."""
    if isinstance(routes, str):
        return routes
    with io.BytesIO() as file:
        np.save(file, routes, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


def logprob(token: int) -> float:
    """A made-up log-probability that depends only on the token."""
    return -0.1 - (token % 7) / 10


def _holds(ids: Sequence[int], stops: Sequence[str]) -> bool:
    text = decode(ids)
    return any(stop in text for stop in stops)


def _refusal(body: dict[str, Any]) -> str:
    """vLLM's error message for a body that it refuses, or "" for a body that it accepts."""
    sampling, salt = body.get("sampling_params", {}), body.get("cache_salt")
    checks: list[tuple[bool, Callable[[], str]]] = [
        (bool(body.get("token_ids")), lambda: "token_ids: List should have at least 1 item"),
        (not sampling.keys() - _KNOWN, lambda: f"sampling_params: unknown {sorted(sampling.keys() - _KNOWN)}"),
        (
            salt is None or (0 < len(salt) <= 128 and not _FORBIDDEN & set(salt)),
            lambda: "Parameter 'cache_salt' must be",
        ),
        (sampling.get("detokenize", True) or not sampling.get("stop"), lambda: "stop strings are only supported when"),
        (
            sampling.get("prompt_logprobs") is None or not body.get("stream"),
            lambda: "`prompt_logprobs` are not available",
        ),
        (
            "no grammar" not in (sampling.get("structured_outputs") or {}).get("grammar", ""),
            lambda: "Invalid grammar specification",
        ),
        (sampling.get("max_tokens", 16) >= 1, lambda: "max_tokens must be at least 1"),
    ]
    return next((say() for sound, say in checks if not sound), "")
