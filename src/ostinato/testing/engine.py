"""`FakeEngine`: a deterministic engine without torch, for tests of code that uses an engine.

Its tokens are the UTF-8 bytes of a scripted answer (id = byte value), followed by `STOP_ID`. It passes the same contract tests as the real
engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from ostinato.core.errors import BadWeights, Unavailable
from ostinato.core.generation import Capabilities, Chunk, Generate, Tops
from ostinato.core.numerics import Contract
from ostinato.core.records import Finish, PolicyVersion
from ostinato.core.weights import Snapshot, Swap, WeightArray
from ostinato.engine.admission import check_loaded, check_request, check_score

STOP_ID = 256
VOCAB_SIZE = 257
CONTRACT = Contract(
    mode="exact",
    torch="none",
    blas="none",
    isa="none",
    threads=1,
    block=1,
    dtype="float32",
    quantisation="none",
    kernels="fake 1",
)
"""The numerics contract: exact, since the fake's made-up log-probabilities are the same on every machine."""


def default_script(request: Generate) -> str:
    """Return the prompt's text reversed, so that different prompts get different answers. The default script."""
    return "".join(reversed(decode(request.prompt_ids))) or "ok"


def encode(text: str) -> list[int]:
    """Return the text's UTF-8 bytes as token ids."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids, without `STOP_ID`, and with the replacement character for invalid UTF-8."""
    return bytes(i for i in ids if i < STOP_ID).decode(errors="replace")


class FakeEngine:
    """Implements `core.seams.Engine`.

    Args:
        script: request -> the answer of each of its samples (default: the prompt reversed).
        delay_s: seconds slept before each token of a stream.
        slots: slot name -> policy version loaded at the start (default: live at version 0).
        context: most tokens of prompt and answer together.

    Controls: `fail_after = k` ends each stream with `failure` (`Finish.ERROR`) after k tokens; `down = True` makes `generate` raise
    `Unavailable`. Observations: `requests` (all received), `running` (open samples), `cancelled` (streams closed before their end).

    Example::

        engine = FakeEngine(lambda request: "hello")
        chunks = [chunk async for chunk in engine.generate(Generate(id="r", slot="live", prompt_ids=(1,), sampling=Sampling(max_tokens=9)))]
        assert "".join(chunk.text for chunk in chunks) == "hello"
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        script: Callable[[Generate], str] | None = None,
        *,
        delay_s: float = 0.0,
        slots: dict[str, PolicyVersion] | None = None,
        context: int = 4096,
        fail_after: int | None = None,
    ) -> None:
        self.script = script or default_script
        self.delay_s = delay_s
        self.context = context
        self.fail_after, self.failure = fail_after, Finish.ERROR
        self.down = False
        self.requests: list[Generate] = []
        self.running = 0
        self.cancelled = 0
        self._slots = dict(slots) if slots is not None else {"live": PolicyVersion(number=0, hash="fake0")}
        self._streams: dict[str, int] = {}
        self._tokens = 0
        self._pauses: list[float] = []

    async def start(self) -> None:
        """Accept requests."""
        self.down = False

    async def close(self) -> None:
        """Refuse requests from now on."""
        self.down = True

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk per token and sample, samples interleaved. Raises as the real engine."""
        if self.down:
            raise Unavailable("The engine is closed or failed; restart it.")
        self._policy(request.slot)
        check_request(request, context=self.context, vocab_size=VOCAB_SIZE)
        self.requests.append(request)
        seed = request.sampling.seed if request.sampling.seed is not None else len(self.requests)
        steps = self._steps(request)
        self.running += request.n
        self._streams[request.slot] = self._streams.get(request.slot, 0) + request.n
        finished, shown, said = False, "", list[int]()
        clock = asyncio.get_running_loop().time
        until = math.inf if request.within_s is None else clock() + request.within_s
        try:
            for token, text, finish in steps:
                await asyncio.sleep(max(0.0, min(self.delay_s, until - clock())))
                if clock() >= until:
                    token, text, finish = None, decode(said)[len(shown) :], Finish.DEADLINE
                ids = () if token is None else (token,)
                shown, said = shown + text, [*said, *ids]
                for index in range(request.n):
                    self._tokens += len(ids)
                    finished = finish is not None and index == request.n - 1
                    yield Chunk(
                        index=index,
                        ids=ids,
                        logprobs=tuple(_logprob(i) for i in ids),
                        policy=self._policy(request.slot),
                        text=text,
                        finish=finish,
                        seed=seed,
                        tops=tuple(_tops(i, request.tops) for i in ids) if request.tops else (),
                    )
                if finish is not None:
                    return
        finally:
            self.running -= request.n
            self._streams[request.slot] -= request.n
            self.cancelled += not finished

    async def end_sample(self, request: str, index: int, tokens: int) -> bytes:
        """Do nothing: there are no experts to report, and the sample continues."""
        return b""

    async def load(self, slot: str, snapshot: Snapshot) -> Swap:
        """Replace the slot's version at once. Raises BadWeights for NaN or infinite weights."""
        for name, array in snapshot.weights.items():
            if not _finite(array):
                raise BadWeights(f"Tensor {name!r} holds a NaN or an infinity; the slot {slot!r} keeps what it had.")
        self._slots[slot] = snapshot.policy
        self._pauses.append(0.0)
        return Swap(slot=slot, policy=snapshot.policy, pause_s=0.0, streams=self._streams.get(slot, 0))

    async def unload(self, slot: str) -> None:
        """Forget a slot. Raises NotFound."""
        self._policy(slot)
        del self._slots[slot]

    async def score(self, slot: str, ids: Sequence[int], start: int, cache_salt: str = "") -> list[float]:
        """Return the same made-up logprobs that `generate` reports."""
        self._policy(slot)
        check_score(ids, start, most=self.context, vocab_size=VOCAB_SIZE)
        return [_logprob(i) for i in ids[start:]]

    def slots(self) -> dict[str, PolicyVersion]:
        """Return the loaded versions by slot."""
        return dict(self._slots)

    def numerics(self) -> str:
        """Return the id of `CONTRACT`."""
        return CONTRACT.id

    def contract(self) -> Contract:
        """Return `CONTRACT`."""
        return CONTRACT

    def capabilities(self) -> Capabilities:
        """Return the capabilities. Scripts count as following any grammar."""
        return Capabilities(context=self.context, vocab_size=VOCAB_SIZE, follows_grammars=True)

    def stats(self) -> dict[str, float]:
        """Return counters that the real engine also has."""
        last = self._pauses[-1] if self._pauses else 0.0
        return {
            "running": self.running,
            "waiting": 0,
            "tokens": self._tokens,
            "swaps": len(self._pauses),
            "last_pause_s": last,
        }

    def _policy(self, slot: str) -> PolicyVersion:
        check_loaded(slot, self._slots)
        return self._slots[slot]

    def _steps(self, request: Generate) -> list[tuple[int | None, str, Finish | None]]:
        """Return (token, text to show, finish) per step, by the real engine's rules for stop strings, token limit and withheld text."""
        sampling, ids = request.sampling, [*encode(self.script(request)), STOP_ID]
        steps: list[tuple[int | None, str, Finish | None]] = []
        shown = 0
        for count, token in enumerate(ids, 1):
            if self.fail_after is not None and count > self.fail_after:
                return [*steps, (None, "", self.failure)]
            text = decode(ids[:count])
            cut = min((at for at in map(text.find, sampling.stop) if at >= 0), default=-1)
            finish: Finish | None = None
            if cut >= 0 or token == STOP_ID:
                finish = Finish.STOP
            elif count == sampling.max_tokens:
                finish = Finish.LENGTH
            end = cut if cut >= 0 else len(text) if finish else len(text) - _withheld(text, sampling.stop)
            end = max(end, shown)
            steps.append((token, text[shown:end], finish))
            shown = end
            if finish is not None:
                break
        return steps


def _withheld(text: str, stops: tuple[str, ...]) -> int:
    """Return how many characters at the end may still change: an incomplete character, or the beginning of a stop string."""
    held = len(text) - len(text.rstrip("\ufffd"))
    for stop in stops:
        sizes = (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size]))
        held = max(held, next(sizes, 0))
    return held


def _logprob(token: int) -> float:
    return -0.1 - (token % 7) / 10


def _tops(token: int, count: int) -> Tops:
    """Return the token itself and its successors in the vocabulary, as made-up top logprobs."""
    return tuple((token + i, _logprob(token) - i) for i in range(count))


def _finite(array: WeightArray) -> bool:
    if array.dtype == "BF16":  # bfloat16 is the upper half of a float32
        return bool(np.isfinite((array.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)).all())
    kinds = {"F32": np.float32, "F64": np.float64, "F16": np.float16}
    return array.dtype not in kinds or bool(np.isfinite(array.data.view(kinds[array.dtype])).all())
