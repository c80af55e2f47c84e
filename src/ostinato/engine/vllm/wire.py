"""The parts of a vLLM server's HTTP responses that are used, as typed records; everything else is ignored.

The shapes are those of vLLM's `entrypoints/scale_out/token_in_token_out/protocol.py`, as of version 0.32.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from ostinato.core import routes
from ostinato.core.errors import BadRoutes, Unavailable
from ostinato.core.generation import Tops

M = TypeVar("M", bound=BaseModel)


class WireSpan(BaseModel, frozen=True):
    """Output tokens [start, end) were sampled by the weights labelled `version`."""

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
    """New tokens of one sample. `weight_versions` and `routed_experts` cover the whole sample and are sent only with its last event."""

    index: int = Field(ge=0)
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[WireSpan] | None = None
    routed_experts: str | None = None
    _routes: bytes = PrivateAttr(default=b"")

    @property
    def routes(self) -> bytes:
        """The encoded expert ids of all computed tokens, once `keep_routes` has read them."""
        return self._routes

    def keep_routes(self, experts: int) -> None:
        """Read `routed_experts`, an .npy file in base64: ids [P + T - 1, L, k] of so many experts. Raises BadRoutes."""
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
    def says_something(self) -> bool:
        """Whether it holds a token or a finish reason."""
        return bool(self.token_ids) or self.finish_reason is not None

    def tops(self, count: int) -> tuple[Tops, ...]:
        """The likeliest `count` tokens at each new token's place; the server lists the sampled token among them whatever its rank."""
        content = self.logprobs.content if self.logprobs is not None else None
        found = ([(top.token_id, top.logprob) for top in entry.top_logprobs] for entry in content or [])
        return tuple(tuple(sorted(tops, key=lambda top: -top[1])[:count]) for tops in found) if count else ()


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
    """The server's start-up settings that matter here."""

    model_config_: _ModelConfig = Field(alias="model_config")
    device_config: _Device = Field(default_factory=_Device)
    scheduler_config: _Scheduler = Field(default_factory=_Scheduler)
    structured_outputs_config: _Grammars = Field(default_factory=_Grammars)
    aux_output_config: _AuxiliaryOutput = Field(default_factory=_AuxiliaryOutput)

    @property
    def returns_routes(self) -> bool:
        """True if its answers say which experts each token went to, for a mixture of experts."""
        return self.aux_output_config.enable_return_routed_experts

    @property
    def logprobs_mode(self) -> str:
        """The kind of log-probabilities that it reports."""
        return self.model_config_.logprobs_mode

    @property
    def reads_lark(self) -> bool:
        """True if llguidance reads its grammars: xgrammar, which "auto" prefers, accepts the same text but ignores parts of it."""
        return self.structured_outputs_config.backend == "guidance"

    @property
    def dies_of_seeds(self) -> bool:
        """True if a chunked prompt of a request with a seed crashes it: a CPU's random generator has no offset to reset."""
        return self.device_config.device.startswith("cpu") and self.scheduler_config.enable_chunked_prefill


class System(BaseModel):
    """The machine and libraries of a server, as far as it says."""

    torch_version: str = "unknown"
    nvidia_gpu_models: str | None = None


class VllmServerInfo(BaseModel):
    """What a server says of itself."""

    vllm_config: VllmSettings
    system_env: System | None = None


class _Version(BaseModel):
    version: str = Field(max_length=200)


def read_event(line: bytes) -> list[WireChoice]:
    """One line of a token stream -> its choices; empty for a line without any. Raises Unavailable for an error or an invalid event."""
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
    """The log-probabilities of ids[start:] from a scored prompt. Raises Unavailable for an invalid response."""
    entries = _read(_Scored, body).prompt_logprobs or []
    if len(entries) != len(ids):
        raise Unavailable(f"the vLLM server scored {len(entries)} of {len(ids)} tokens")
    found = [(entry or {}).get(str(token)) for token, entry in zip(ids[start:], entries[start:], strict=True)]
    if None in found:
        raise Unavailable("the vLLM server left a token without its log-probability")
    return [entry.logprob for entry in found if entry is not None]


def read_context(body: bytes) -> int:
    """The context length (prompt and answer together, in tokens), from the list of models."""
    return _read(_Cards, body).data[0].max_model_len


def read_about(body: bytes) -> VllmServerInfo:
    """The server's settings and system."""
    return _read(VllmServerInfo, body)


def read_version(body: bytes) -> str:
    """The version of vLLM."""
    return _read(_Version, body).version


def _array(text: str) -> NDArray[np.integer]:
    """The integers in an .npy file. Its claims are compared with its length before memory is taken. Raises BadRoutes."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not version 1.0 of .npy")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        data = file.read()
        if fortran or dtype.kind not in "iu" or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes for {shape} of {dtype}")
        return np.frombuffer(data, dtype).reshape(shape)
    except (binascii.Error, ValueError) as error:
        raise BadRoutes(f"what the vLLM server says of experts is not understood: {error}", reason="corrupt") from error


def _read(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "its JSON"
        raise Unavailable(f"the vLLM server's answer is not understood: {where}: {first['msg']}") from error
