"""An HTTP client of one vLLM server: its settings, token streams and scores. Its weights are handled elsewhere (`WeightDriver`).

The used parts of a response are parsed into typed records; everything else is ignored. The schemas follow vLLM's
`entrypoints/scale_out/token_in_token_out/protocol.py`, as of version 0.32. `OpenAnswer` turns a server's token events into the chunks of
one request, and attributes each token to the version that made it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import math
import tokenize
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from typing import Annotated, Any, Protocol, Self, TypeVar

import aiohttp
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from ostinato.core import routes
from ostinato.core.errors import BadConfig, BadRequest, BadRoutes, Unavailable
from ostinato.core.generation import Chunk, Generate, Tops
from ostinato.core.records import Finish, PolicyVersion
from ostinato.engine.admission import shown
from ostinato.model.stream import TextStream

M = TypeVar("M", bound=BaseModel)


class WireSpan(BaseModel, frozen=True):
    """The server's report that the weights labelled `version` sampled output tokens [start, end)."""

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class _Logprob(BaseModel):
    logprob: float = Field(allow_inf_nan=False, le=0.0)


class _Candidate(_Logprob):
    token_id: int


class _Sampled(_Logprob):
    top_logprobs: list[_Candidate] = Field(default_factory=list[_Candidate])


class _Logprobs(BaseModel):
    content: list[_Sampled] | None = None


class WireChoice(BaseModel):
    """New tokens of one sample. `weight_versions` and `routed_experts` cover the whole sample, and come only with its last event."""

    index: int = Field(ge=0)
    token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[WireSpan] | None = None
    routed_experts: str | None = None
    _routes: bytes = PrivateAttr(default=b"")

    @property
    def routes(self) -> bytes:
        """The encoded expert ids of all computed tokens; b"" before `keep_routes` has decoded them."""
        return self._routes

    def keep_routes(self, experts: int) -> None:
        """Decode `routed_experts`, an .npy file in base64: ids in [0, experts) of shape [P + T - 1, L, k]. Raises BadRoutes."""
        if self.routed_experts is not None:
            self._routes = routes.encode(_array(self.routed_experts), experts)

    @property
    def ids(self) -> list[int]:
        """The new tokens."""
        return self.token_ids or []

    @property
    def values(self) -> list[float]:
        """The new tokens' log-probabilities."""
        content = self.logprobs.content if self.logprobs is not None else None
        return [entry.logprob for entry in content or []]

    @property
    def has_output(self) -> bool:
        """Whether it holds a token or a finish reason."""
        return bool(self.token_ids) or self.finish_reason is not None

    def tops(self, count: int) -> tuple[Tops, ...]:
        """Return the `count` most likely tokens at each new token's position. The server also lists the sampled token, at any rank."""
        content = self.logprobs.content if self.logprobs is not None else None
        listed = ([(top.token_id, top.logprob) for top in entry.top_logprobs] for entry in content or [])
        return tuple(tuple(sorted(tops, key=lambda top: -top[1])[:count]) for tops in listed) if count else ()


class _Error(BaseModel):
    message: str = "no message"


class _Event(BaseModel):
    choices: list[WireChoice] = Field(default_factory=list[WireChoice])
    error: _Error | None = None


class _Scored(BaseModel):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Card(BaseModel):
    max_model_len: int = Field(gt=0)


class _Cards(BaseModel):
    data: list[_Card] = Field(min_length=1)


class _ModelConfig(BaseModel):
    logprobs_mode: str
    dtype: str = "unknown"
    quantization: str | None = None


class _Grammars(BaseModel):
    backend: str = "auto"


class _Device(BaseModel):
    device: str = ""


class _AuxiliaryOutput(BaseModel):
    enable_return_routed_experts: bool = False


class _Scheduler(BaseModel):
    enable_chunked_prefill: bool = False


class VllmSettings(BaseModel):
    """The server's start-up settings, as far as they matter here."""

    model_config_: _ModelConfig = Field(alias="model_config")
    device_config: _Device = Field(default_factory=_Device)
    scheduler_config: _Scheduler = Field(default_factory=_Scheduler)
    structured_outputs_config: _Grammars = Field(default_factory=_Grammars)
    aux_output_config: _AuxiliaryOutput = Field(default_factory=_AuxiliaryOutput)

    @property
    def crashes_on_seeds(self) -> bool:
        """True if a seeded request with a chunked prompt crashes the server: a CPU's random generator has no offset to reset."""
        return self.device_config.device.startswith("cpu") and self.scheduler_config.enable_chunked_prefill


class System(BaseModel):
    """The machine and libraries of a server, as far as it reports them."""

    torch_version: str = "unknown"
    nvidia_gpu_models: str | None = None


class VllmServerInfo(BaseModel):
    """A server's report about itself."""

    vllm_config: VllmSettings
    system_env: System | None = None


class _Version(BaseModel):
    version: str = Field(max_length=200)


def read_event(line: bytes) -> list[WireChoice]:
    """Parse one line of a token stream into its choices, [] if it has none. Raises Unavailable for an error or an invalid event."""
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return []
    event = _read(_Event, line[6:])
    if event.error is not None:
        raise Unavailable(f"the vLLM server ended the stream: {event.error.message}")
    for choice in event.choices:
        if len(choice.ids) != len(choice.values):
            raise Unavailable(f"the vLLM server sent {len(choice.ids)} tokens with {len(choice.values)} logprobs")
    return event.choices


def read_scores(body: bytes, ids: list[int], start: int) -> list[float]:
    """Parse the log-probabilities of ids[start:] from a scored prompt. Raises Unavailable for an invalid response."""
    entries = _read(_Scored, body).prompt_logprobs or []
    if len(entries) != len(ids):
        raise Unavailable(f"the vLLM server scored {len(entries)} of {len(ids)} tokens")
    scored = [(entry or {}).get(str(token)) for token, entry in zip(ids[start:], entries[start:], strict=True)]
    if None in scored:
        raise Unavailable("the vLLM server left a token without its log-probability")
    return [entry.logprob for entry in scored if entry is not None]


_BAD_HEADER = (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
"""What numpy raises for an invalid .npy header, which it parses as Python literals and then as tokens."""


def _array(text: str) -> NDArray[np.integer]:
    """Read the integers of a base64 .npy file. Its header is checked against its length before memory is allocated. Raises BadRoutes."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not version 1.0 of .npy")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        data = file.read()
        if fortran or dtype.kind not in "iu" or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes for {shape} of {dtype}")
        return np.frombuffer(data, dtype).reshape(shape)
    except _BAD_HEADER as error:
        raise BadRoutes(f"the vLLM server's routed_experts are not understood: {error}", reason="corrupt") from error


def _read(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "its JSON"
        raise Unavailable(f"the vLLM server's answer is not understood: {where}: {first['msg']}") from error


# ---------------------------------------------------------------- token events -> chunks


_LOG = logging.getLogger(__name__)


class _Sample:
    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.ids: list[int] = []
        self.runs: list[tuple[str, int]] = []  # (version hash, first token) of each run of tokens by one version
        self.ended = False

    def spans(self) -> list[tuple[str, int, int]]:
        """Return (version hash, first token, end) of each run."""
        ends = [start for _, start in self.runs[1:]] + [len(self.ids)]
        return [(hash, start, end) for (hash, start), end in zip(self.runs, ends, strict=True)]


class OpenAnswer:
    """The samples of one request. `take` processes the server's events; `end` ends the samples that the server did not finish.

    A token's version is the one that its slot held when the token arrived. The server reports its own attribution only with a sample's
    last event. If the two differ, the sample ends with `Finish.ERROR`, because tokens of unknown origin must not be trained on.
    """

    def __init__(
        self, request: Generate, seed: int, *, stop_ids: Set[int], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._request, self._seed, self._stop_ids = request, seed, stop_ids
        self._samples = [_Sample(TextStream(decode, request.sampling.stop)) for _ in range(request.n)]

    @property
    def missing(self) -> int:
        """The number of samples that have not ended."""
        return sum(not sample.ended for sample in self._samples)

    def take(self, choice: WireChoice, policy: PolicyVersion) -> Chunk | None:
        """Return the chunk for new tokens, made by `policy`; None if they arrive after their sample's end."""
        if choice.index >= len(self._samples) or self._samples[choice.index].ended:
            return None
        sample = self._samples[choice.index]
        if choice.ids and (not sample.runs or sample.runs[-1][0] != policy.hash):
            sample.runs.append((policy.hash, len(sample.ids)))
        text, finish, used = "", None, 0
        for token in choice.ids:
            used += 1
            sample.ids.append(token)
            more, finish = shown(
                sample.text, token, self._stop_ids, last=len(sample.ids) == self._request.sampling.max_tokens
            )
            text += more
            if finish is not None:
                break
        if finish is None and choice.finish_reason is not None:
            finish = {"stop": Finish.STOP, "length": Finish.LENGTH}.get(choice.finish_reason, Finish.ERROR)
            text += sample.text.flush()
        if finish is not None and not self._matches_server(sample, choice):
            finish = Finish.ERROR
        sample.ended = finish is not None
        return Chunk(
            index=choice.index,
            ids=tuple(choice.ids[:used]),
            logprobs=tuple(choice.values[:used]),
            policy=policy,
            text=text,
            finish=finish,
            seed=self._seed,
            routes=b"" if finish in (None, Finish.ERROR) else choice.routes,
            tops=choice.tops(self._request.tops)[:used],
        )

    def constrained(self, chunk: Chunk) -> Sequence[int] | None:
        """Return the ids of the sample that this chunk ends, if it should be a complete answer under the request's grammar, else None."""
        if not self._request.sampling.grammar or chunk.finish is not Finish.STOP:
            return None
        sample = self._samples[chunk.index]
        return None if sample.text.stopped else sample.ids  # a stop string may cut an answer anywhere

    def end(self, finish: Finish, policy: PolicyVersion) -> list[Chunk]:
        """End all samples that have not ended; return their final chunks. At a deadline, a sample that saw a swap ends with `Finish.ERROR`,
        because the server's attribution of tokens to versions will never arrive.
        """
        chunks: list[Chunk] = []
        for index, sample in enumerate(self._samples):
            if sample.ended:
                continue
            sample.ended = True
            last, text = finish, ""
            if finish is Finish.DEADLINE:
                text = sample.text.flush()
                last = Finish.ERROR if len(sample.runs) > 1 else Finish.STOP if sample.text.stopped else finish
            chunks.append(
                Chunk(index=index, ids=(), logprobs=(), policy=policy, text=text, finish=last, seed=self._seed)
            )
        return chunks

    def _matches_server(self, sample: _Sample, choice: WireChoice) -> bool:
        """Return whether the server attributes the tokens to the same versions as we do. If we end the sample before the server does, there
        is no report yet, and only a sample that saw no swap is accepted.
        """
        if choice.finish_reason is None:  # we ended it before the server did
            return len(sample.runs) <= 1
        reported = [
            (span.version, span.start, min(span.end, len(sample.ids)))
            for span in choice.weight_versions or ()
            if span.start < min(span.end, len(sample.ids))
        ]
        if reported != sample.spans():
            _LOG.error(
                "request %s: the server says that its tokens were made by %s, not by %s; the answer ends as an error",
                self._request.id,
                reported or "versions that it does not name",
                sample.spans(),
            )
        return reported == sample.spans()


# ---------------------------------------------------------------- a server


_PATH = "/inference/v1/generate"
_LOGPROBS_MODE = "processed_logprobs"
_RETRY_S = 1.0
_GRACE_S = 60.0
_LINE, _LINE_WITH_ROUTES = 1 << 20, 1 << 27  # bytes, half of the longest event: 100,000 tokens' routes may take 85 MB
_START_HINT = (
    "start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --logprobs-mode processed_logprobs and what "
    "`ostinato weights drive-vllm --help` says of weights; for JSON schemas and demanded calls also with "
    "--structured-outputs-config.backend guidance"
)


class Paused(Protocol):
    """The result of a weight swap."""

    @property
    def pause_s(self) -> float:
        """Seconds during which the server made no token."""
        ...


class WeightDriver(Protocol):
    """Stages and loads versions of the weights on one server; implemented by `weights.follow.drive.VllmFollower`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...

    async def served(self) -> str:
        """Return the hash of the version that the server reports to serve."""
        ...

    async def stage(self, policy: PolicyVersion) -> object:
        """Have the server fetch and verify a version while it keeps serving. Raises Corrupt, Unavailable."""
        ...

    async def has_staged(self, policy: PolicyVersion) -> bool:
        """Return whether the server still has the staged version; it may have been restarted since. Raises Unavailable."""
        ...

    async def swap(self, policy: PolicyVersion, loaded: Callable[[], object]) -> Paused:
        """Load a version. Calls `loaded` when the weights are in place, before the server resumes."""
        ...


class ServerClient:
    """An HTTP client of one server. `driver` loads weights onto it. `experts`: the model's experts per layer, 0 for a dense model.

    `follows_grammars`: its options let it follow our grammars. `reported`: its vLLM version and its report about itself. Both are set by
    `context`.
    """

    def __init__(self, url: str, driver: WeightDriver, *, silence_s: float, experts: int = 0) -> None:
        self.url, self.driver, self._experts = url.rstrip("/"), driver, experts
        self.follows_grammars = False
        self.reported: tuple[str, VllmServerInfo] | None = None
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silence_s),
            # no limit, because the server has its own; no keep-alive, because a closing idle connection would look like a failed server
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            read_bufsize=_LINE_WITH_ROUTES if experts else _LINE,
        )

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._session.close()

    async def context(self, within_s: float) -> int:
        """Wait for the server, check its options, and return its context length (prompt and answer together, in tokens).

        Raises Unavailable if it does not answer within `within_s`, BadConfig if it was started with wrong options.
        """
        ends = asyncio.get_running_loop().time() + within_s
        while True:
            try:
                context = _read(_Cards, await self._ask("/v1/models")).data[0].max_model_len
                break
            except Unavailable:
                if asyncio.get_running_loop().time() >= ends:
                    raise
                await asyncio.sleep(_RETRY_S)
        about = _read(VllmServerInfo, await self._ask("/server_info?config_format=json"))
        version, settings = _read(_Version, await self._ask("/version")).version, about.vllm_config
        if (mode := settings.model_config_.logprobs_mode) != _LOGPROBS_MODE:
            raise BadConfig(f"{self.url} reports {mode}, which leave the temperature out: {_START_HINT}")
        if settings.crashes_on_seeds:
            raise BadConfig(
                f"{self.url} runs on a CPU with chunked prefill, where one long prompt with a seed ends it; start it with "
                f"--no-enable-chunked-prefill --max-num-batched-tokens {context} (its context)"
            )
        if self._experts and not settings.aux_output_config.enable_return_routed_experts:
            _LOG.warning(
                "%s does not say which experts a token went to, so the trainer leaves its answers out: start it with "
                "--enable-return-routed-experts, or set train.router_replay = false",
                self.url,
            )
        # xgrammar, the preference of "auto", accepts our grammars but ignores parts of them
        self.follows_grammars = settings.structured_outputs_config.backend == "guidance"
        self.reported = version, about
        return context

    async def check_health(self) -> None:
        """Raise Unavailable if the server cannot be reached or reports that its engine is dead."""
        await self._ask("/health")

    async def tokens(self, body: Mapping[str, Any]) -> AsyncGenerator[WireChoice, None]:
        """Yield new tokens as they are sampled; closing the generator aborts the request. Raises BadRequest, Unavailable."""
        try:
            async with self._session.post(self.url + _PATH, json=dict(body) | {"stream": True}) as reply:
                await self._check(reply)
                async for line in reply.content:
                    for choice in read_event(line):
                        await self._keep_routes(choice)
                        yield choice
        except BadRequest:  # is a ValueError too, but the caller's fault
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._lost(error) from error

    async def _keep_routes(self, choice: WireChoice) -> None:
        """Decode the choice's routes, if any, in a thread, because those of a long answer take a while. Invalid routes are dropped."""
        if not self._experts or choice.routed_experts is None:
            return
        try:
            await asyncio.to_thread(choice.keep_routes, self._experts)
        except BadRoutes as error:
            _LOG.error("%s: the routes of an answer are not kept: %s", self.url, error)

    async def scores(self, ids: Sequence[int], start: int, salt: str) -> list[float]:
        """Return the log-probabilities of ids[start:] at temperature 1. Raises Unavailable."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(ids), "sampling_params": sampling, "cache_salt": salt}
        return read_scores(await self._ask(_PATH, body), list(ids), start)

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        verb = "GET" if body is None else "POST"
        try:
            async with self._session.request(verb, self.url + path, json=body) as reply:
                await self._check(reply)
                return await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error

    async def _check(self, reply: aiohttp.ClientResponse) -> None:
        if reply.status < 400:
            return
        said = " ".join((await reply.text()).split())[:500]
        if reply.status == 404:
            raise BadConfig(f"{self.url} has no {reply.url.path}: {_START_HINT}")
        if reply.status == 400:
            raise BadRequest(f"The vLLM server refuses the request: {said}")
        raise Unavailable(f"{self.url}{reply.url.path} answers {reply.status}: {said}")

    def _lost(self, error: Exception) -> Unavailable:
        return Unavailable(f"{self.url} cannot be reached: {type(error).__name__}: {error}; is the vLLM server up?")


async def contexts_of(servers: Sequence[ServerClient], within_s: float) -> list[int]:
    """Return the context lengths of the servers that answer within `within_s`, and within `_GRACE_S` of the first one.

    `reported` stays None for the others. Raises Unavailable if no server answers, BadConfig if one was started with wrong options.
    """
    asked = [asyncio.ensure_future(server.context(within_s)) for server in servers]
    try:
        for answer in asyncio.as_completed(asked):
            with contextlib.suppress(Unavailable):
                await answer
                break
        await asyncio.wait(asked, timeout=_GRACE_S)
    finally:
        for each in asked:
            each.cancel()
        results = await asyncio.gather(*asked, return_exceptions=True)
    contexts = list[int]()
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, int):
            contexts.append(result)
            continue
        server.reported = None
        if not isinstance(result, (Unavailable, asyncio.CancelledError)):
            raise result
        _LOG.error("%s does not answer yet; the others are used without it", server.url)
    if not contexts:
        raise next(each for each in results if isinstance(each, Unavailable))
    return contexts
