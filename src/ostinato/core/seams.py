"""The seams: small Protocols between the rooms. Only `app/` knows both sides of a seam."""

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
    ParsedCall,
    Pending,
    Person,
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
from ostinato.core.sandbox import Change, ExecResult, Isolation, SandboxSpec
from ostinato.core.steering import PersonView, Steering, StylesView
from ostinato.core.weights import Learned, Snapshot, Swap

R = TypeVar("R", bound=Row)

Cursor = int
"""A position in the log: the sequence number of the last row seen; 0 is before the first."""


class Clock(Protocol):
    """Returns Unix seconds; injected so that tests control time."""

    def __call__(self) -> float: ...


@runtime_checkable
class Engine(Protocol):
    """Generates tokens: the embedded torch engine, or the client of an inference server. Single use: `start`, any calls, `close`."""

    async def start(self) -> None:
        """Prepare for `load`; all slots are empty. Raises Unavailable if it was started before or cannot be reached."""
        ...

    async def close(self) -> None:
        """End open streams with `Finish.ABORT` and release all resources. Idempotent."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        """Stream chunks. Closing the iterator stops the work within one engine step, and so does the end of `Generate.within_s`, for
        queued and running samples alike. All tokens sampled by then have been streamed; the last chunk has any withheld text.
        """
        ...

    async def end_sample(self, request: str, index: int, tokens: int) -> bytes:
        """End one sample of an open request, of which the caller wants only the first `tokens`; no last chunk follows.

        Returns the encoded experts of these tokens and the prompt's (`Chunk.routes`). Returns b"" without experts, for a sample that has
        already ended, and from an engine that can end a request only as a whole, which then continues the sample.
        """
        ...

    async def load(self, slot: str, snapshot: Snapshot) -> Swap:
        """Load a snapshot into a slot. Streams in the slot continue with the new weights. Returns the measured pause."""
        ...

    async def unload(self, slot: str) -> None:
        """Empty a slot; its open streams end with `Finish.ERROR`. Raises NotFound."""
        ...

    async def score(self, slot: str, ids: Sequence[int], start: int, cache_salt: str = "") -> list[float]:
        """Return the log-probabilities (temperature 1) of ids[start:], each given the ids before it; `cache_salt` as in `Generate`."""
        ...

    def slots(self) -> dict[str, PolicyVersion]:
        """Return the policy version loaded in each slot."""
        ...

    def numerics(self) -> str:
        """Return the id of the numerics contract of log-probabilities; "" if unknown. It never changes within a process."""
        ...

    def contract(self) -> Contract | None:
        """Return the contract itself; None if unknown."""
        ...

    def capabilities(self) -> Capabilities:
        """Return what the engine can do. It never changes within a process."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return gauges and counters since the start. Times in seconds; tokens, blocks and samples are counts."""
        ...


@runtime_checkable
class Log(Protocol):
    """The append-only log. Rows are durable when `append` returns. A repeated identity is ignored, not an error."""

    async def append(self, *rows: Row) -> Cursor:
        """Write all rows or none. Returns the sequence number of the newest row in the log. Raises StorageFull."""
        ...

    def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Yield the rows of the given kinds with a sequence number above `after`, in order, up to now."""
        ...

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        """Return the rows of one kind with these identities (`records.identity`), in the requested order, without unknown ones."""
        ...

    async def horizon(self) -> Cursor:
        """Return the position up to which retention may have dropped rows; 0 if it has dropped none."""
        ...

    async def before_last(self, count: int, kind: type[Row]) -> Cursor:
        """Return the position after which there are exactly the newest `count` rows of a kind; 0 if there are fewer rows."""
        ...


@runtime_checkable
class Folds(Protocol):
    """Snapshots of folds: state computed from the log up to a position, so that a start need not read the log from its first row.

    A snapshot is never the only copy of a fact: at any start it may be missing, or older than the last one saved.
    """

    async def save(self, name: str, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Replace the snapshot of this name atomically. `state` consists of JSON types. Raises StorageFull."""
        ...

    async def load(self, name: str) -> tuple[Cursor, dict[str, Any]] | None:
        """Return the snapshot last saved under this name; None if there is none, or it is damaged. Raises Unavailable."""
        ...


PersonValue = tuple[Cursor, int | None, bytes]
"""A person's cached state: the place of the last change, the number of the key that encrypts it, and the bytes."""


class PersonCache(Protocol):
    """One value per person, folded from the log, encrypted with the person's own key. It may be lost, and is then folded again."""

    def begin(self, rules: str, older: str | None = None) -> tuple[Cursor, str]:
        """Return the place and the note of the last write; (0, "") if there is none, or if the values were made by other rules, which drops
        them. Values made by the rules `older` are kept, and count as made by `rules` from now on.

        Raises StorageFull, Unavailable.
        """
        ...

    def key(self, person: Person) -> int | None:
        """Return the number of the key of a person's value now; None if nothing is encrypted, or their key was destroyed."""
        ...

    def load(self, person: Person) -> bytes | None:
        """Return a person's value; None without one, or if their key was destroyed. Raises Corrupt, Unavailable."""
        ...

    def newest(self, tenant: str, most: int, without: Collection[Person] = ()) -> list[bytes]:
        """Return the values of the `most` people of a tenant whose values changed last, in the order of their changes.

        People in `without` are left out, as are people whose key was destroyed and damaged values. Raises Unavailable.
        """
        ...

    def count(self, tenant: str) -> int:
        """Return the number of people of a tenant with a value. Raises Unavailable."""
        ...

    def crowded(self, tenant: str) -> bool:
        """Return True if a new person of the tenant evicts another one's value, or has done so since the values were first made. Raises
        Unavailable.
        """
        ...

    def pseudonym(self, person: Person) -> str:
        """Return a name for a person that only this cache can compute."""
        ...

    def write(self, cursor: Cursor, note: str, values: Mapping[Person, PersonValue | None]) -> None:
        """Write values, or drop those that are None, with the place up to which the log was folded: all or nothing.

        A value encrypted with a key that is no longer the person's is dropped as well. Raises StorageFull, Unavailable; then call it again.
        """
        ...


class Adaptation(Protocol):
    """Steers the answers to people towards what their ratings prefer."""

    async def start(self) -> None:
        """Start following the log."""
        ...

    async def close(self) -> None:
        """Stop."""
        ...

    def steering(self, person: Person, *, weights: str, verified: bool) -> Steering | None:
        """Return how to steer a person's next answer by the weights of this hash; None if the base model answers.

        `verified`: the tenant proved who it is. Never waits, and never raises if state cannot be read.
        """
        ...

    def fits(self, weights: Collection[str]) -> bool:
        """Return True if answers by all the weights of these hashes can be steered, by the same dials."""
        ...

    def heard(self) -> None:
        """Note that signals were written to the log. Returns at once."""
        ...

    @property
    def verified_only(self) -> bool:
        """True if only people with a proven identity have dials."""
        ...

    async def shown(self, person: Person, *, weights: str) -> PersonView:
        """Return what is known about a person, as of every row in the log now; `weights`: the hash of the live version's.

        Raises Corrupt, StorageFull, Unavailable.
        """
        ...


class StyleDealer(Protocol):
    """Assigns a style, an addition to the system prompt, to each of a person's conversations."""

    async def start(self) -> None:
        """Start following the log."""
        ...

    async def close(self) -> None:
        """Stop."""
        ...

    def texts(self, policies: Collection[PolicyVersion], *, shared: bool = True) -> Mapping[str, str]:
        """Return the text of each style that is approved for all these versions, by arm. `shared`: they are no tenant's branch."""
        ...

    def deal(self, person: Person, arms: Collection[str]) -> Pick | None:
        """Draw the style of a person's new conversation, or no style, among these arms with the current odds; None without arms.

        Never waits, and never raises if state cannot be read.
        """
        ...

    def entitled(self, person: Person, *, verified: bool) -> bool:
        """Return True if a person may be assigned styles."""
        ...

    def heard(self) -> None:
        """Note that signals were written to the log. Returns at once."""
        ...

    @property
    def verified_only(self) -> bool:
        """True if only people with a proven identity have styles."""
        ...

    @property
    def none(self) -> str:
        """The arm without a style."""
        ...

    @property
    def arms(self) -> Mapping[str, str]:
        """The arm of each style by its name, including the one without a style."""
        ...

    async def shown(self, person: Person, *, policies: Collection[PolicyVersion], shared: bool = True) -> StylesView:
        """Return what is known about a person, as of every row in the log now, and the styles assigned if these versions answer (`texts`).

        Raises Corrupt, StorageFull, Unavailable.
        """
        ...


@runtime_checkable
class WeightStore(Protocol):
    """Content-addressed objects and named refs."""

    async def put(self, data: bytes | memoryview) -> str:
        """Store bytes durably under their hash and return the hash. Idempotent."""
        ...

    async def get(self, hash: str) -> bytes:
        """Return the bytes with this hash, verified. Raises NotFound or Corrupt."""
        ...

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        """Return `length` bytes of an object from `start`, not verified: the caller must check them.

        Raises NotFound; Corrupt if the object is shorter; BadRequest for a negative start or length.
        """
        ...

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Compare and swap a ref; `old` None means the ref must not exist, or must have no hash. Raises Conflict."""
        ...

    async def read_ref(self, ref: str) -> str | None:
        """Return the hash a ref points to, or None."""
        ...


class Dealer(Protocol):
    """Draws an episode's arm from the available ones."""

    def draw(self, available: Collection[str], place: float) -> Pick | None:
        """Return the arm at `place` in [0, 1), a random number of the caller's, with the current odds; None if no arm is available."""
        ...


class RewardFn(Protocol):
    """Signals -> one scalar, or Pending while the maturity window is open, or NoReward. Pure; independent of signal order."""

    def __call__(self, turn: Turn, signals: Sequence[Signal], now: float) -> Reward | Pending | NoReward: ...


class Credit(Protocol):
    """Whole episodes and their turns' rewards -> each turn's advantages. Pure: the same arguments give the same numbers.

    Groups are never split: all episodes of a group that are in a batch are passed in one call. Raises NoSignal for a batch that would
    teach nothing.
    """

    def __call__(self, episodes: Sequence[Episode], rewards: Mapping[str, float]) -> Mapping[str, Advantages]:
        """Return by turn id one advantage per sampled token. `rewards`: by turn id, one for every turn."""
        ...


class AnswerReader(Protocol):
    """Streaming parser of one answer: splits it into text, reasoning and calls while it is sampled.

    Nothing is lost and nothing is retracted: an incomplete call is returned as plain text, and a call is returned only when it is
    complete.
    """

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the new text completes."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces held back because more text might have followed. Nothing may be fed after this call."""
        ...

    def in_call(self) -> bool:
        """Return True while the text of a call is fed: its beginning has been read, but not its end."""
        ...

    def parsed_calls(self, *, unfinished: bool = True) -> list[ParsedCall]:
        """Return the first `MAX_PARSED_CALLS` calls in the text fed so far, with their places, including malformed ones.

        An incomplete one counts as malformed, or is left out if `unfinished` is false.
        """
        ...


class Renderer(Protocol):
    """Messages <-> tokens for one model. Text from users can never become a control token."""

    vocab_size: int
    context: int

    def chat(self, conversation: Conversation) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's answer (or to continue its last message). Raises BadRequest."""
        ...

    def follow_up(self, conversation: Conversation, known: int) -> list[int]:
        """Return the ids to append to a stored turn so that `messages[known:]` follow it. Raises BadRequest.

        `messages[:known]` ends with the assistant message that the stored turn sampled (its end token, if sampled, is included
        in the stored ids): the result starts with whatever the template puts after that message and its end token.
        """
        ...

    def grammar(self, conversation: Conversation) -> str:
        """Return the grammar that the answer must follow (`Sampling.grammar`); "" if there is no constraint. Raises BadRequest."""
        ...

    def call_token(self) -> int | None:
        """Return the control token without which no call can begin, so that a bias on it forbids calls; None if there is none."""
        ...

    def has_compiled(self, grammar: str) -> bool:
        """Return True if `compile` would return at once."""
        ...

    def compile(self, grammar: str) -> None:
        """Compile a grammar, so that answers can be constrained to it; may take seconds. Raises BadRequest for a grammar that cannot be
        followed or is too expensive to follow; Unavailable if this cannot be determined now.
        """
        ...

    def fulfils(self, grammar: str, ids: Sequence[int]) -> bool:
        """Return True if the grammar accepts these tokens as a whole answer, with or without its stop token. May take milliseconds."""
        ...

    def reader(self, conversation: Conversation, turn: str) -> AnswerReader:
        """Return a reader for the answer to a conversation; its calls get ids that name the turn (`core.conversation.call_id`)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text; control tokens in it are encoded as ordinary characters."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without control tokens."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text, possibly only part of a character; b"" for a control token without text."""
        ...

    def opens_call(self, text: str) -> bool:
        """Return True if a tool call begins in a part of an answer."""
        ...

    def stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an assistant's turn."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """An isolated file system and the programs that run in it. Its state persists between calls until `stop`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
    ) -> ExecResult:
        """Run a program to completion; after `timeout` seconds it and all processes it started are killed. `cwd` None is the working
        directory. If the kernel reports it, time in which the machine's other programs kept it from running does not count, up to eight
        times `timeout` in total.

        Background processes that it leaves behind run until `stop`. Raises BadRequest for a `cwd` outside the sandbox; Unavailable if
        the sandbox is gone.
        """
        ...

    async def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        """Return a file's bytes; no link is followed out of the working directory. Raises NotFound; TooLarge beyond `most` bytes."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file, and create its parent directories. Raises BadRequest for a path outside; StorageFull beyond the disk limit."""
        ...

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """Start `count` sandboxes from copies of this one's current files; running programs are not copied. Raises Unavailable."""
        ...

    async def diff(self) -> Sequence[Change]:
        """Return the changes since the start, by path."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """Return a socket for the caller that listens on a port of the sandbox's own loopback interface, which nothing else can reach.

        Raises BadRequest for an invalid port number; Unavailable if the port is taken, or if sandboxes are remote.
        """
        ...

    async def stop(self) -> None:
        """End every program and discard the files. Idempotent."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Creates sandboxes."""

    async def isolation(self) -> Isolation:
        """Return the isolation available on this machine. Raises SandboxRefused, with the failed step and the remedy, if there is none."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; waits while too many are open. Raises BadRequest, SandboxRefused, Unavailable."""
        ...

    async def close(self) -> None:
        """End every sandbox and release all resources. Idempotent."""
        ...


# ---------------------------------------------------------------- stages of the training cycle


class TurnSource(Protocol):
    """Source of turns: people, or simulated worlds."""

    async def collect(self) -> Sequence[Turn]: ...


class Rewards(Protocol):
    """Turns -> a batch of samples with credit; writes a reward row or a recorded reason for each turn."""

    async def score(self, turns: Sequence[Turn]) -> TrainingBatch: ...


class Trainer(Protocol):
    """Trains all weights, one optimizer step at a time."""

    async def step(self, batch: TrainingBatch) -> Learned: ...


class Publisher(Protocol):
    """Weights -> content-addressed snapshot, not yet live."""

    async def publish(self, learned: Learned) -> PolicyVersion: ...


class Evals(Protocol):
    """Evaluates a candidate against live, best and anchor on the same items, through the gateway that people use."""

    async def run(self, candidate: PolicyVersion, *, against: Incumbents) -> Report: ...


class Releases(Protocol):
    """The release ledger and the refs."""

    @property
    def live(self) -> PolicyVersion: ...

    def incumbents(self, candidate: PolicyVersion) -> Incumbents: ...

    async def decide(self, candidate: PolicyVersion, report: Report) -> ReleaseEvent: ...
