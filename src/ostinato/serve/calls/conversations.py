"""Token-in, token-out: a follow-up call reuses the token ids that were sampled instead of tokenising their text again.

A conversation that a client sends back is recognised by a hash chain over its tools and messages. They are normalised, so that an agent's
edits to an answer before it sends it back do not matter (`core/json_shape.py`). After a restart only the log's turns are known, which
hold ids but no messages; a conversation is then recognised once by rendering it and comparing ids.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.conversation import Conversation, Message, Piece, Role, ToolCall, calling_turn, digest, tools_digest
from ostinato.core.errors import BadRequest
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Branch, ParsedCall, Pick, Purpose, Turn, Window, WindowMaker
from ostinato.core.seams import AnswerReader, Renderer
from ostinato.serve.calls.compaction import SummaryIndex, SummaryTurn
from ostinato.serve.reader import LongRenderer

# ---------------------------------------------------------------- parsing an answer


class AnswerParser:
    """Parses one answer and accumulates the result. Without a reader, everything is text.

    Args:
        reader: separates text, reasoning and calls.
        one_call: an answer may make only one call: where a second begins, the answer is `over`, and the rest is dropped.

    Example::

        reading = AnswerParser(renderer.reader(conversation, turn))
        pieces = reading.take("Let me look.", last=False)
        ...
        answer = reading.message()
    """

    def __init__(self, reader: AnswerReader | None, *, one_call: bool = False) -> None:
        self.over = False
        self._reader = reader
        self._one_call = one_call
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def take(self, text: str, *, last: bool) -> list[Piece]:
        """Parse new text and return the pieces that it completes. `last`: no text follows."""
        if self._reader is None:
            return self._accept([Piece(text=text)] if text else [])
        pieces = self._accept(self._reader.feed(text) if text else [])
        self.over |= self._one_call and bool(self._calls) and self._reader.in_call()
        return [*pieces, *self._accept(self._reader.finish())] if last and not self.over else pieces

    def _accept(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Accumulate the pieces up to a call that is not allowed, and return them."""
        accepted: list[Piece] = []
        for piece in pieces:
            self.over |= self._one_call and piece.call is not None and bool(self._calls)
            if self.over:
                break
            accepted.append(piece)
            self._text.append(piece.text)
            self._reasoning.append(piece.reasoning)
            if piece.call is not None:
                self._calls.append(piece.call)
        return accepted

    def parsed_calls(self) -> tuple[ParsedCall, ...]:
        """Return the first 256 calls so far with their positions in the text, including malformed ones, which were passed on as text."""
        if self._reader is None:
            return ()
        # if it is over, the unfinished call is the dropped one
        calls = self._reader.parsed_calls(unfinished=not self.over)
        dropped = [place for place, call in enumerate(calls) if call.name][len(self._calls) :]
        return tuple(calls[: dropped[0]] if dropped else calls)

    def message(self) -> Message:
        """Return the message parsed so far."""
        return Message(
            role=Role.ASSISTANT,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
        )


# ---------------------------------------------------------------- repeated questions


_MAX_QUESTIONS = 16_384


class RecentQuestions:
    """The most recent questions and their styles, to recognise a question that is asked again (a regenerated answer)."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[bytes, str], tuple[str, Pick | None]] = OrderedDict()

    def again(self, question: bytes, episode: str, user: str = "", style: Pick | None = None) -> bool:
        """Remember a question; return True if it was asked before in its episode."""
        place = (question, episode)
        asked = place in self._asked
        self._asked.setdefault(place, (user, style))
        self._asked.move_to_end(place)
        if len(self._asked) > _MAX_QUESTIONS:
            self._asked.popitem(last=False)
        return asked

    def dealt(self, question: bytes, episode: str) -> tuple[Pick | None] | None:
        """Return a 1-tuple with the style that a question had when first asked in its episode; None if it was not asked."""
        asked = self._asked.get((question, episode))
        return None if asked is None else asked[1:]

    def forget(self, user: str | None) -> None:
        """Drop a user's questions; None drops everybody's."""
        for place in [place for place, (whose, _) in self._asked.items() if user in (None, whose)]:
            del self._asked[place]


# ---------------------------------------------------------------- conversations


OWN_EPISODE = "ep-"  # prefix of the episode names that the gateway makes up
AUTO = "auto"  # the arm in all scopes of Auto's calls, so that a conversation is found whichever arm answered
_OVERHEAD = 32  # memory cost of an entry besides its ids, in ids
_PER_LINE = 4  # ids of the budget for each line held in the summary index
_MAX_PREFILL_GUESSES = 8  # most of a user's turns that are tried for a message that may begin with the client's prefill
_NEWEST = 8  # a user's newest turns from the log, among which the parent of the next one is sought


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationScope:
    """The set of conversations that may be continued: those of one user of one tenant in one arm; with an `episode`, only that episode's.

    Anonymous callers are different people: they find a conversation only if they name the episode or send back one of its tool calls, whose
    id only the client that received it knows.

    Example: ``ConversationScope(tenant="default", user="u42", arm="live", episode=None)``
    """

    tenant: str
    user: str
    arm: str
    episode: str | None = None

    @property
    def place(self) -> bytes:
        """A hash of the tenant, user and arm."""
        return _scope_hash(self.tenant, self.user, self.arm)

    @property
    def shared(self) -> bool:
        """True if its callers may be different people, who must not find each other's conversations."""
        return self.user == ANONYMOUS and self.episode is None


@dataclass(slots=True)
class _Run:
    """The token ids of turns that continue each other, stored once and shared. `users`: the number of entries that refer to it."""

    ids: array[int]
    users: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """An indexed turn. `known`: its ids are exactly what the client saw, apart from the end token if `ended`."""

    turn: str
    user: str
    episode: str
    run: _Run
    length: int  # how many of the run's ids are this turn's prompt and answer
    ended: bool
    known: bool
    prompt: int  # length of the prompt, in ids
    text: str  # the sampled text if the turn was read from the log; else ""
    task: bool
    window: Window | None
    style: Pick | None

    @property
    def ids(self) -> array[int]:
        """The ids of its prompt and its sampled tokens."""
        return self.run.ids[: self.length]

    def asks(self, ids: array[int]) -> bool:
        """Return True if these ids are its prompt."""
        return self.prompt == len(ids) and self.run.ids[: self.prompt].tobytes() == ids.tobytes()


@dataclass(slots=True, kw_only=True)
class PendingPrompt:
    """A conversation to be answered, before its prompt is rendered. `chain`: one hash per message, each covering everything before it."""

    scope: ConversationScope
    conversation: Conversation
    chain: list[bytes]
    # the chain without the style, under which answers are found in any style; indices are those of `chain`
    plain: list[bytes]
    spoken: list[int]  # the indices of the assistant's messages before the last message, in descending order
    known: int  # number of leading messages that the found turn covers
    entry: _Entry | None
    summary: SummaryTurn | None = None  # the summary with which it begins, if it continues no turn
    origin: list[bytes] | None = None  # the chain of the client's messages, if some were cleared by context edits
    cleared: _Entry | None = None  # the turn that it would continue if nothing had been cleared
    again: bool = False  # the same question was asked before
    begun: bool = False  # its episode already has turns
    packed: array[int] | None = None  # the prompt's ids, if it was rendered from scratch
    # turns of the log, now with their hash
    warmed: list[tuple[bytes, _Entry]] = field(default_factory=list[tuple[bytes, _Entry]])

    @property
    def prefill(self) -> str:
        """The beginning of the answer that the client supplied; "" if none."""
        return self.conversation.messages[-1].text if self.conversation.continued else ""

    @property
    def window(self) -> Window | None:
        """Its context window: that of the turn that it continues, or the one that begins with the summary."""
        if (entry := self.entry or self.cleared) is not None:
            return entry.window
        return None if self.summary is None else self.summary.next_window()

    @property
    def style(self) -> Pick | None:
        """The style assigned to the conversation that it continues."""
        entry = self.entry or self.cleared
        return None if entry is None else entry.style

    @property
    def before(self) -> bytes:
        """The hash of all messages before the answer."""
        return self.chain[-2 if self.conversation.continued else -1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids for the engine and the turn that they continue. `branch` says why they do not continue the episode's newest turn.

    Example: ``Prompt(ids=(1, 2, 7, 9, 4), parent="chatcmpl-3f:0", episode="e1")``; `parent` and `episode` are None when new.
    `packed`: the ids as little-endian uint32 (`Turn.packed_prompt`), if available.
    """

    ids: tuple[int, ...]
    parent: str | None = None
    episode: str | None = None
    branch: Branch = Branch.NONE
    window: Window | None = None
    packed: bytes = field(default=b"", repr=False)


class Sessions:
    """Finds the indexed turn that a conversation continues. Bounded by an LRU cache of turns.

    `look`, `remember` and `restore` must run on one thread; `render` only reads, so it may run on another thread at the same time.

    Args:
        renderer: converts messages to token ids and back.
        budget: most token ids held in memory.

    Example::

        question = sessions.look(scope, conversation, chain_of(scope, conversation))
        prompt = sessions.render(question)
        ...  # the answer is sampled and stored as a turn
        sessions.remember(question, turn, answer)
    """

    def __init__(self, renderer: Renderer | LongRenderer, *, budget: int) -> None:
        self._renderer = renderer
        self._budget = budget
        self._held = 0
        # by hash of the conversation, and episode
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()
        self._latest: dict[bytes, str] = {}  # hash of the conversation -> its newest episode
        self._cold: dict[bytes, list[_Entry]] = defaultdict(list)  # turns read from the log, by scope; newest last
        self._questions = RecentQuestions()
        self._turns: Counter[str] = Counter()  # episode -> number of indexed turns with the purpose TASK
        self._stop_ids = renderer.stop_ids()
        self._summaries = SummaryIndex(budget // _PER_LINE)

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._cold.values()))

    def look(
        self,
        scope: ConversationScope,
        conversation: Conversation,
        chain: list[bytes],
        summary: SummaryTurn | None = None,
        *,
        origin: list[bytes] | None = None,
        plain: list[bytes] | None = None,
        style: Pick | None = None,
    ) -> PendingPrompt:
        """Look a conversation up by its hashes (`chain`, from `chain_of`). `summary`: the one with which it provably begins; `origin`: the
        hashes of what the client sent, if some of that was cleared; `plain`: the hashes without the style, if it has one; `style`: the one
        assigned to it, if it begins here.
        """
        plain = plain or chain
        # anonymous callers may ask the same question, and any user may begin two conversations with the same words
        spoken = _assistant_indices(conversation.messages)
        recognisable = not scope.shared and (scope.episode is not None or bool(spoken))
        question = PendingPrompt(
            scope=scope,
            conversation=conversation,
            chain=chain,
            plain=plain,
            spoken=spoken,
            known=0,
            entry=None,
            summary=summary if summary is not None and scope.episode in (None, summary.episode) else None,
            origin=origin,
            again=recognisable and self._questions.again(plain[-1], scope.episode or "", scope.user, style),
            begun=scope.episode is not None and self._turns[scope.episode] > 0,
        )
        if origin is not None and self._entries:
            found = ((i, self._find(origin[i + 1], scope.episode)) for i in spoken)
            known = (e for i, e in found if e and (not scope.shared or _made_by(conversation.messages[i], e.turn)))
            question.cleared = next(known, None)
        for i in spoken if self._entries else ():
            entry = self._find(chain[i + 1], scope.episode)
            if entry is None:
                continue
            if question.entry is None:
                question.known, question.entry = i + 1, entry
            if not scope.shared or _made_by(conversation.messages[i], entry.turn):
                return question
        if scope.shared:
            question.known, question.entry = 0, None
        return question

    def render(self, question: PendingPrompt) -> Prompt:
        """Return the prompt's ids, reusing those of the found turn. Raises BadRequest for messages that cannot be rendered."""
        if question.entry is None and self._cold:
            # a part of the conversation that cannot be rendered by itself ends the search
            with suppress(BadRequest):
                self._find_cold(question)
        unknown = question.entry is None and question.cleared is None and question.summary is None
        if unknown and not question.scope.shared:
            scope, messages = question.scope, question.conversation.messages
            question.summary = self._summaries.find(_answers_of(scope), scope.episode, messages)
        entry, conversation = question.entry, question.conversation
        if conversation.continued:
            ids = self._render_whole(question)
            extends = entry is not None and entry.known and entry.ids == ids[: entry.length]
            return _prompt(ids, question, follows=extends)
        following = None if entry is None else self._follow(entry, conversation, question.known)
        ids = self._render_whole(question) if following is None else following
        return _prompt(ids, question, follows=following is not None)

    def _render_whole(self, question: PendingPrompt) -> array[int]:
        """Render a conversation from scratch. The ids are packed here because `remember` runs on the event loop and must be fast."""
        question.packed = array("i", self._renderer.chat(question.conversation))
        return question.packed

    def remember(self, question: PendingPrompt, turn: Turn, answer: Message, *, seen: bool = True) -> None:
        """Index the turn that answered this question. `seen`: the client received all of it."""
        for key, entry in question.warmed:
            self._put(key, entry)
        question.warmed.clear()
        if turn.finish.complete:
            whole = replace(answer, text=question.prefill + answer.text)
            entry = self._entry(turn, question.entry, packed=question.packed, seen=seen)
            self._put(_extended(question.before, whole.digest), entry)
            # a follow-up to the uncleared messages continues this turn, but cannot reuse its tokens
            if question.origin is not None:
                before = question.origin[-2 if question.conversation.continued else -1]
                self._put(_extended(before, whole.digest), replace(entry, known=False))
            if question.plain is not question.chain:  # so that a follow-up without the style finds it
                before = question.plain[-2 if question.conversation.continued else -1]
                self._put(_extended(before, whole.digest), replace(entry, known=False))
            self._index(turn, question.scope, answer)

    def restore(self, turn: Turn) -> None:
        """Index a turn read from the log."""
        if not turn.finish.complete or turn.redacted:
            return
        arm = turn.arm if turn.auto is None else AUTO
        cold = self._cold[_scope_hash(turn.tenant, turn.user, arm)]
        before = next((entry for entry in reversed(cold[-_NEWEST:]) if entry.turn == turn.parent), None)
        entry = self._entry(turn, before, text=turn.text)
        cold.append(entry)
        self._hold(entry)
        scope = ConversationScope(tenant=turn.tenant, user=turn.user, arm=arm, episode=turn.episode)
        self._index(turn, scope, self._read(Conversation(messages=()), entry))

    def forget(self, row: Forgotten) -> None:
        """Drop everything held about a forgotten user of this tenant."""
        for key, episode in [key for key, entry in self._entries.items() if row.user in (None, entry.user)]:
            self._drop(key, episode)
        for place, entries in [*self._cold.items()]:
            if row.user in (None, entries[0].user):
                for entry in self._cold.pop(place):
                    self._release(entry)
        self._summaries.forget(row.user)
        self._questions.forget(row.user)

    def _index(self, turn: Turn, scope: ConversationScope, answer: Message) -> None:
        """Add an answer to the summary index: it may be the summary with which a later window begins."""
        if (scope.user == ANONYMOUS and not _client_episode(scope)) or answer.calls or turn.calls:
            return
        by = {Arm.OUTSIDE: WindowMaker.OUTSIDE, Arm.WORLD: WindowMaker.HARNESS}.get(turn.arm, WindowMaker.AGENT)
        number = 0 if turn.window is None else turn.window.number
        summary = SummaryTurn(turn=turn.id, episode=turn.episode, number=number, by=by)
        asked = turn.purpose is Purpose.COMPACTION
        self._summaries.add(_answers_of(scope), summary, answer.text, scope.user, asked=asked)

    # ------------------------------------------------------------ lookup

    def dealt(self, scope: ConversationScope, chain: list[bytes]) -> tuple[Pick | None] | None:
        """Return the style with which a conversation's first question was asked before, as a 1-tuple; None if it was not, or if the
        client did not name the episode. `chain`: that of the question without a style.
        """
        return None if scope.episode is None or scope.shared else self._questions.dealt(chain[-1], scope.episode)

    def knows(
        self, scope: ConversationScope, conversation: Conversation, chain: list[bytes], arms: Collection[str | None]
    ) -> bool:
        """True if the newest turn of this process that a conversation continues has one of these styles. Only for named users."""
        found = (self._find(chain[i + 1], scope.episode) for i in _assistant_indices(conversation.messages))
        entry = next((entry for entry in found if entry is not None), None)
        return entry is not None and (entry.style and entry.style.arm) in arms

    def knows_cold(
        self, scope: ConversationScope, conversation: Conversation, chain: list[bytes], arms: Collection[str | None]
    ) -> bool:
        """Like `knows`, for turns of earlier processes. It only reads, and it renders the conversation."""
        spoken = _assistant_indices(conversation.messages)
        asked = PendingPrompt(
            scope=scope, conversation=conversation, chain=chain, plain=chain, spoken=spoken, known=0, entry=None
        )
        with suppress(BadRequest):
            self._find_cold(asked)
        return asked.entry is not None and (asked.entry.style and asked.entry.style.arm) in arms

    def _find(self, key: bytes, episode: str | None) -> _Entry | None:
        place = (key, episode if episode is not None else self._latest.get(key, ""))
        entry = self._entries.get(place)
        if entry is not None:
            self._entries.move_to_end(place)
        return entry

    def _find_cold(self, question: PendingPrompt) -> None:
        """Match the conversation's answers in turn with turns from the log, by the ids of their prompts."""
        scope, conversation = question.scope, question.conversation
        place = scope.place
        cold = [entry for entry in self._cold.get(place, ()) if scope.episode in (None, entry.episode)]
        spoken = question.spoken[::-1]
        if not cold or not spoken or (scope.shared and not conversation.messages[spoken[0]].calls):
            return
        ids = self._renderer.chat(_prefix(conversation, spoken[0])) if spoken[0] else None
        for position, i in enumerate(spoken):
            entry = self._match(cold, ids, _prefix(conversation, i + 1))
            if entry is None:
                return
            question.known, question.entry = i + 1, entry
            question.warmed.append((question.chain[i + 1], entry))
            if position + 1 < len(spoken):
                upto = _prefix(conversation, spoken[position + 1])
                ids = self._follow(entry, upto, i + 1) or self._renderer.chat(upto)

    def _match(self, cold: list[_Entry], ids: Iterable[int] | None, conversation: Conversation) -> _Entry | None:
        """Return the newest turn with this prompt whose answer is the last message, or is what follows the client's prefill in it."""
        last = conversation.messages[-1]
        guesses, prompt = 0, None if ids is None else array("i", ids)
        for entry in reversed(cold):
            if prompt is not None and entry.asks(prompt):
                if self._read(conversation, entry).digest == last.digest:
                    return entry
                continue
            if last.calls or not entry.text or not last.text.endswith(entry.text) or guesses == _MAX_PREFILL_GUESSES:
                continue
            guesses += 1
            prefill = replace(last, text=last.text[: len(last.text) - len(entry.text)])
            asked = replace(conversation, messages=(*conversation.messages[:-1], prefill), continued=True)
            if entry.asks(array("i", self._renderer.chat(asked))):
                return entry
        return None

    def _read(self, conversation: Conversation, entry: _Entry) -> Message:
        reading = AnswerParser(self._renderer.reader(conversation, entry.turn))
        reading.take(entry.text, last=True)
        return reading.message()

    # ------------------------------------------------------------ ids

    def _follow(self, entry: _Entry, conversation: Conversation, known: int) -> array[int] | None:
        """Return the turn's ids plus the new messages' ids; None if the client did not see all of them or the end token is ambiguous."""
        if known >= len(conversation.messages) or not entry.known:
            return None
        try:
            rest = self._renderer.follow_up(conversation, known)
        except BadRequest:  # the template cannot render the new messages by themselves
            return None
        closing = [] if entry.ended else self._closing(conversation, known, rest)
        return None if closing is None else entry.ids + array("i", [*closing, *rest])

    def _closing(self, conversation: Conversation, known: int, rest: list[int]) -> list[int] | None:
        """Return the end token that the template puts between the answer and the `follow_up` ids; None if it puts anything else there."""
        if conversation.messages[known - 1].calls:
            return None
        opened = self._renderer.chat(replace(_prefix(conversation, known), continued=True))
        whole = self._renderer.chat(conversation)
        closing = whole[len(opened) : len(whole) - len(rest)]
        fits = whole[: len(opened)] == opened and whole[len(whole) - len(rest) :] == rest
        return closing if fits and len(closing) == 1 and closing[0] in self._stop_ids else None

    def _entry(
        self, turn: Turn, before: _Entry | None, text: str = "", *, packed: array[int] | None = None, seen: bool = True
    ) -> _Entry:
        """Make the entry of a turn. It extends the run of the turn that it continues, unless another turn has already extended that run.

        `packed`: the ids of its prompt, if available.
        """
        ended = bool(turn.sampled_ids) and turn.sampled_ids[-1] in self._stop_ids
        length = len(turn.prompt_ids) + len(turn.sampled_ids)
        if before is None or turn.parent != before.turn:
            run = _Run((packed or array("i", turn.prompt_ids)) + array("i", turn.sampled_ids))
        else:
            new = array("i", turn.prompt_ids[before.length :] + turn.sampled_ids)
            if before.length == len(before.run.ids):
                run = before.run
                run.ids.extend(new)
                self._held += len(new) if run.users else 0
            else:
                run = _Run(before.ids + new)
        return _Entry(
            turn=turn.id,
            user=turn.user,
            episode=turn.episode,
            run=run,
            length=length,
            ended=ended,
            # false after a stop string or a dropped second call, which the client did not see, and for outside models, which give no ids
            known=seen and bool(turn.sampled_ids) and (ended or turn.finish.cut),
            prompt=len(turn.prompt_ids),
            text=text,
            task=turn.purpose is Purpose.TASK,
            window=turn.window,
            style=turn.style,
        )

    # ------------------------------------------------------------ memory

    def _put(self, key: bytes, entry: _Entry) -> None:
        place = (key, entry.episode)
        old = self._entries.pop(place, None)
        if old is not None:
            self._release_indexed(old)
        self._entries[place] = entry
        self._turns[entry.episode] += entry.task
        self._latest[key] = entry.episode
        self._hold(entry)

    def _hold(self, entry: _Entry) -> None:
        self._held += _OVERHEAD + (0 if entry.run.users else len(entry.run.ids))
        entry.run.users += 1
        while self._held > self._budget and (self._cold or self._entries):
            self._evict()

    def _release(self, entry: _Entry) -> None:
        entry.run.users -= 1
        self._held -= _OVERHEAD + (0 if entry.run.users else len(entry.run.ids))

    def _release_indexed(self, entry: _Entry) -> None:
        """Release an entry that was removed from `_entries`."""
        self._release(entry)
        self._turns[entry.episode] -= entry.task
        if not self._turns[entry.episode]:
            del self._turns[entry.episode]

    def _evict(self) -> None:
        """Evict the oldest entry, first among the turns read from the log, most of which are never needed again."""
        if self._cold:
            place = next(iter(self._cold))
            entries = self._cold[place]
            self._release(entries.pop(0))
            if not entries:
                del self._cold[place]
            return
        self._drop(*next(iter(self._entries)))

    def _drop(self, key: bytes, episode: str) -> None:
        self._release_indexed(self._entries.pop((key, episode)))
        if self._latest.get(key) == episode:
            del self._latest[key]


def _prompt(ids: array[int], question: PendingPrompt, *, follows: bool) -> Prompt:
    """Make a prompt of these ids, packed once for all their users. `follows`: they continue the found turn."""
    packed = ids.tobytes()
    if sys.byteorder == "big":
        swapped = array("i", packed)
        swapped.byteswap()
        packed = swapped.tobytes()
    unpacked = struct.unpack(f"={len(ids)}i", ids)
    entry = question.entry
    before = entry or question.cleared or question.summary  # its episode goes on
    return Prompt(
        ids=unpacked,
        parent=entry.turn if entry is not None and follows else None,
        episode=question.scope.episode or (None if before is None else before.episode),
        branch=_branch(question, follows=follows),
        window=question.window,
        packed=packed,
    )


def _assistant_indices(messages: Sequence[Message]) -> list[int]:
    """The indices of the assistant's messages before the last message, in descending order."""
    return [i for i in range(len(messages) - 2, -1, -1) if messages[i].role is Role.ASSISTANT]


def _branch(question: PendingPrompt, *, follows: bool) -> Branch:
    """Return why a prompt does not simply continue the newest turn of its episode; NONE if it does.

    `follows`: the prompt is the found turn's ids plus the new messages.
    """
    entry, answers = question.entry, question.spoken
    if question.again:
        return Branch.AGAIN
    if entry is None and question.cleared is None and question.summary is not None:
        return Branch.COMPACTED
    if entry is None:
        begun = question.begun or question.cleared is not None
        return Branch.NONE if not begun else Branch.EDITED if answers else Branch.FRESH
    if any(place >= question.known for place in answers):  # a later answer matches no indexed turn
        return Branch.EDITED
    if not follows:
        return Branch.UNSEEN
    alone = entry.length == len(entry.run.ids)  # no other turn continues the found one
    return Branch.NONE if alone else Branch.PARALLEL


def _made_by(message: Message, turn: str) -> bool:
    """True if the message has a tool call made by this turn: only a client that received the turn knows the call's id."""
    return any(calling_turn(call.id) == turn for call in message.calls)


def _prefix(conversation: Conversation, count: int) -> Conversation:
    """Return a conversation's first messages."""
    return Conversation(messages=conversation.messages[:count], tools=conversation.tools)


def chain_of(scope: ConversationScope, conversation: Conversation) -> list[bytes]:
    """Return a hash of tenant, user, arm and tools, then one hash per message, each covering everything before it. Pure."""
    last = digest(scope.place, tools_digest(conversation.tools))
    hashes = [last]
    for message in conversation.messages:
        last = _extended(last, message.digest)
        hashes.append(last)
    return hashes


def _answers_of(scope: ConversationScope) -> bytes:
    """The key of a user's answers in the summary index. Episodes named by the client have keys of their own."""
    return digest(scope.place, _client_episode(scope))


def _client_episode(scope: ConversationScope) -> str:
    """The episode as named by the client; "" if the gateway made up the name, even if the client repeats it."""
    return "" if scope.episode is None or scope.episode.startswith(OWN_EPISODE) else scope.episode


def _scope_hash(tenant: str, user: str, arm: str) -> bytes:
    return digest(b"", tenant, user, arm)


def _extended(before: bytes, message: bytes) -> bytes:
    """Extend a conversation's hash by that of one message; both have the same fixed length."""
    return blake2b(before + message, digest_size=16).digest()
