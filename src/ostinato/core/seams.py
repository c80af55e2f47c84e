"""The seams: small Protocols through which the rooms meet. `app/` is the only place that knows both sides of one."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ostinato.core.conversation import Conversation, Piece
from ostinato.core.generation import Capabilities, Chunk, Generate
from ostinato.core.numerics import Contract
from ostinato.core.records import (
    Advantages,
    Identity,
    NoReward,
    Pending,
    Pick,
    PolicyVersion,
    ReleaseEvent,
    Reward,
    Row,
    Signal,
    Turn,
)
from ostinato.core.report import Incumbents, Report
from ostinato.core.samples import Episode, TrainingBatch
from ostinato.core.sandboxing import Change, ExecResult, Isolation, SandboxSpec
from ostinato.core.weights import Learned, Snapshot, Swap

R = TypeVar("R", bound=Row)

Cursor = int
"""A position in the log: the sequence number of the last row seen; 0 is before the first."""


class Clock(Protocol):
    """Unix seconds; injected so that tests own time."""

    def __call__(self) -> float: ...


@runtime_checkable
class Engine(Protocol):
    """Makes tokens: the embedded torch engine, or a client of a server. One life: `start`, any number of calls, `close`."""

    async def start(self) -> None:
        """Be ready for `load`; slots are empty. Raises Unavailable if it was started before or cannot be reached."""
        ...

    async def close(self) -> None:
        """End open streams with `Finish.ABORT` and let go of everything. Idempotent."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        """Stream chunks; closing the iterator stops the work within one engine step, and so does the end of `Generate.within_s`, for a
        sample that waits as for one that runs. What was sampled by then has been streamed; the last chunk brings text that was withheld.
        """
        ...

    async def load(self, slot: str, snapshot: Snapshot) -> Swap:
        """Put a snapshot into a slot. Streams in the slot go on with the new weights; returns the measured pause."""
        ...

    async def unload(self, slot: str) -> None:
        """Empty a slot; its open streams end with `Finish.ERROR`. Raises NotFound."""
        ...

    async def score(self, slot: str, ids: Sequence[int], start: int) -> list[float]:
        """Log-probabilities (temperature 1) of ids[start:] given what stands before each."""
        ...

    def slots(self) -> dict[str, PolicyVersion]:
        """What is loaded now."""
        ...

    def numerics(self) -> str:
        """The id of the contract that logprobs are computed under; "" if it is not known. Never changes in one process."""
        ...

    def contract(self) -> Contract | None:
        """The contract itself, if it is known."""
        ...

    def capabilities(self) -> Capabilities:
        """What it can do. Never changes in one process."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Gauges and counters since the start. Times in seconds; tokens, blocks and samples are counts."""
        ...


@runtime_checkable
class Log(Protocol):
    """The append-only log. Rows are durable when `append` returns; a repeated identity is ignored, not an error."""

    async def append(self, *rows: Row) -> Cursor:
        """Write all rows or none. Returns the sequence number of the newest row in the log. Raises StorageFull."""
        ...

    def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Rows of the given kinds with a sequence number above `after`, in order, up to now."""
        ...

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        """The rows of one kind with these identities (`records.identity`), in the order asked for; unknown ones are left out."""
        ...

    async def horizon(self) -> Cursor:
        """Rows up to here may have been dropped, by retention; 0 while none has."""
        ...

    async def before_last(self, count: int, kind: type[Row]) -> Cursor:
        """The place above which the newest `count` rows of a kind lie, and no more of them; 0 if there are not so many."""
        ...


@runtime_checkable
class Folds(Protocol):
    """State that was folded from the log, with the position that it stands for, so that a start need not read the log from its first row.

    A fold is never the only place of a truth: it may be missing, or older than it was, at any start.
    """

    async def save(self, name: str, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Replace what is kept under this name, whole or not at all. `state` is made of JSON's types. Raises StorageFull."""
        ...

    async def load(self, name: str) -> tuple[Cursor, dict[str, Any]] | None:
        """What was saved last under this name; None if nothing was, or if it cannot be read."""
        ...


@runtime_checkable
class WeightStore(Protocol):
    """Content-addressed objects and named refs."""

    async def put(self, data: bytes | memoryview) -> str:
        """Store bytes durably under their hash and return it. Idempotent."""
        ...

    async def get(self, hash: str) -> bytes:
        """The bytes with this hash, verified. Raises NotFound or Corrupt."""
        ...

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        """A part of an object, `length` bytes from `start`; not verified: the caller checks them.

        Raises NotFound; Corrupt if the object is shorter; BadRequest for a negative start or length.
        """
        ...

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Compare-and-swap; `old` None means the ref must not exist, or hold no hash. Raises Conflict."""
        ...

    async def read_ref(self, ref: str) -> str | None:
        """The hash a ref points to, or None."""
        ...


class Dealer(Protocol):
    """Draws the arm of an episode among those that can be had."""

    def draw(self, available: Collection[str], place: float) -> Pick | None:
        """The arm at a place in [0, 1), chosen at random by the caller, with the odds of that moment; None if no arm is available."""
        ...


class RewardFn(Protocol):
    """Signals -> one scalar, or Pending while the maturity window is open, or NoReward. Pure; independent of signal order."""

    def __call__(self, turn: Turn, signals: Sequence[Signal], now: float) -> Reward | Pending | NoReward: ...


class Credit(Protocol):
    """Whole episodes and their turns' rewards -> each turn's advantages. Pure: the same arguments give the same numbers.

    Groups are never split: all episodes of a group that are in a batch come in one call. Raises NoSignal for a batch that would
    teach nothing.
    """

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """`rewards` by turn id, one for every turn. Returns by turn id one advantage per sampled token."""
        ...


class AnswerReader(Protocol):
    """Tells text, reasoning and calls apart in one answer while it is sampled.

    Nothing is lost and nothing is taken back: what reads as a call only in part comes as the text that it is, and a call comes
    when it is complete.
    """

    def feed(self, text: str) -> list[Piece]:
        """What new text settles."""
        ...

    def finish(self) -> list[Piece]:
        """What was held because more might have followed. Nothing is fed after it."""
        ...


class Renderer(Protocol):
    """Messages <-> tokens for one model. Text from users can never become a control token."""

    vocab_size: int
    context: int

    def chat(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation, ready for the assistant to speak (or to go on with its last message). Raises BadRequest."""
        ...

    def follow_up(self, conversation: Conversation, known: int) -> list[int]:
        """Ids to append to a stored turn so that `messages[known:]` follow it. Raises BadRequest.

        `messages[:known]` ends with the assistant message that the stored turn sampled (its end token, if sampled, included
        in the stored ids): the answer starts with whatever the template puts after that message and its end token.
        """
        ...

    def grammar(self, conversation: Conversation) -> str:
        """What the answer must follow (`Sampling.grammar`); "" where the conversation demands nothing. Raises BadRequest."""
        ...

    def has_compiled(self, grammar: str) -> bool:
        """True if `compile` would return at once."""
        ...

    def compile(self, grammar: str) -> None:
        """Make sure that answers can be held to a grammar; may take seconds. Raises BadRequest for one that cannot be followed, or costs
        too much to; Unavailable if that cannot be found out now.
        """
        ...

    def reader(self, conversation: Conversation, turn: str) -> AnswerReader:
        """Reads the answer to a conversation; its calls get ids that name the turn (`core.conversation.call_id`)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; control tokens in it are encoded as ordinary characters."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token shows, which may be a part of a character only; b"" for a control token that shows nothing."""
        ...

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an assistant's turn."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """One isolated file system and what runs in it. Its state lasts from call to call, until `stop`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
    ) -> ExecResult:
        """Run a program to its end; after `timeout` seconds it and all that it started are killed. `cwd` None: the working directory.

        What it leaves running in the background goes on until `stop`. Raises BadRequest for a `cwd` outside of the sandbox; Unavailable if
        the sandbox is gone.
        """
        ...

    async def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        """A file's bytes; no link is followed out of the working directory. Raises NotFound; TooLarge beyond `most` bytes."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file, and make the directories above it. Raises BadRequest for a path outside; StorageFull beyond the disk limit."""
        ...

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """So many sandboxes that start from this one's files as they are now; programs are not copied. Raises Unavailable."""
        ...

    async def diff(self) -> Sequence[Change]:
        """What is not as it was at the start, by path."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """A socket of the caller's that listens at a port of the sandbox's own loopback, which nothing else can reach.

        Raises BadRequest for a number that is no port; Unavailable if the port is taken, or where sandboxes are too far away for this.
        """
        ...

    async def stop(self) -> None:
        """End every program and forget the files. Idempotent."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Where sandboxes come from."""

    async def isolation(self) -> Isolation:
        """What it offers on this machine. Raises SandboxRefused where it cannot isolate at all, with the step and the way out."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox; waits for its turn where too many are open. Raises BadRequest, SandboxRefused, Unavailable."""
        ...

    async def close(self) -> None:
        """End every sandbox and let go of everything. Idempotent."""
        ...


# ---------------------------------------------------------------- the stages of the cycle


class TurnSource(Protocol):
    """Where turns come from: people, or simulated worlds."""

    async def collect(self) -> Sequence[Turn]: ...


class Rewards(Protocol):
    """Turns -> a batch of samples with credit; writes a reward row or a recorded reason for each turn."""

    async def score(self, turns: Sequence[Turn]) -> TrainingBatch: ...


class Trainer(Protocol):
    """All weights, one optimizer step at a time."""

    async def step(self, batch: TrainingBatch) -> Learned: ...


class Publisher(Protocol):
    """Weights -> content-addressed snapshot. Not yet live."""

    async def publish(self, learned: Learned) -> PolicyVersion: ...


class Evals(Protocol):
    """Candidate against live, best and anchor on the same items, through the same gateway as people."""

    async def run(self, candidate: PolicyVersion, *, against: Incumbents) -> Report: ...


class Releases(Protocol):
    """The ledger and the refs."""

    @property
    def live(self) -> PolicyVersion: ...

    @property
    def incumbents(self) -> Incumbents: ...

    async def decide(self, candidate: PolicyVersion, report: Report) -> ReleaseEvent: ...
