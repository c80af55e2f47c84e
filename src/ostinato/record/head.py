"""Inserts rows into the open segment, in a transaction that the appender (`log.py`) has begun."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ostinato.core.records import PolicyVersion, Turn
from ostinato.core.seams import Cursor
from ostinato.record.codec import turns
from ostinato.record.codec.kinds import TURNS
from ostinato.record.codec.shrink import Training, Use
from ostinato.record.codec.tokens import PackedTokens, narrow, shared_ids, unflat
from ostinato.record.codec.turns import Held, KeyDestroyed, Ready
from ostinato.record.config import RecordConfig
from ostinato.record.packed_rows import DAMAGE, PackedRows

# ---------------------------------------------------------------- delta encoding: the bases of turns


MAX_CHAIN = 32
"""The longest chain of bases. Reading one turn may mean reading as many others."""

_MIN_SHARED = 8  # with fewer shared ids a base saves less than naming it costs
_PREFIX_LENGTHS = (1024, 256, 64, 16)  # in ids; the hashes of these prefixes find prompts that begin alike
_CACHE_BYTES = 32 << 20  # of token ids in memory


@dataclass(frozen=True, slots=True)
class BaseCandidate:
    """A candidate base: its sequence number, its token ids, and how many leading ids it shares with the prompt."""

    seq: Cursor
    held: Held
    shared: int


class Bases:
    """A cache of the newest turns of the open segment, of which later turns store only the difference (delta encoding).

    A base must be encrypted under the same key as the turn. Candidates are found by turn id and by hashes of the prompt and its prefixes;
    then their shared ids are counted.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[Cursor, Held, list[int]]] = OrderedDict()
        self._prompts: dict[int, str] = {}
        self._weight = 0

    def __contains__(self, turn: str) -> bool:
        return turn in self._turns

    def add(self, seq: Cursor, turn: str, held: Held, hashes: Sequence[int] = ()) -> None:
        """Cache a written turn, to be found by its id or by these hashes of its prompt."""
        own = [each for each in hashes if self._prompts.setdefault(each, turn) is turn]
        self._turns[turn] = (seq, held, own)
        self._weight += len(held.ids)
        while self._weight > _CACHE_BYTES and len(self._turns) > 1:
            _, (_, dropped, theirs) = self._turns.popitem(last=False)
            self._weight -= len(dropped.ids)
            for each in theirs:
                self._prompts.pop(each, None)

    def best(
        self, prompt: bytes, secret: int | None, parent: str | None, hashes: Sequence[int]
    ) -> BaseCandidate | None:
        """Return the turn that shares the most leading ids with a prompt; on a tie, the one with the shorter chain of bases."""
        names = {parent, *(self._prompts.get(each) for each in hashes[:1])}
        names.add(next((self._prompts[each] for each in hashes[1:] if each in self._prompts), None))
        found: BaseCandidate | None = None
        for name in names:
            if name is None or name not in self._turns:
                continue
            seq, held, _ = self._turns[name]
            if held.secret == secret and held.depth < MAX_CHAIN:
                base = BaseCandidate(seq, held, shared_ids(prompt, held.ids))
                if base.shared >= _MIN_SHARED and (found is None or _rank(base) > _rank(found)):
                    found = base
        return found


def hashes_of(prompt: bytes, secret: int | None) -> list[int]:
    """Return hashes of the whole prompt and of its prefixes, longest first. They are valid only within this process."""
    beginnings = [prompt[: 4 * count] for count in _PREFIX_LENGTHS if len(prompt) >= 4 * count]
    return [hash((secret, part)) for part in (prompt, *beginnings)]


def _rank(base: BaseCandidate) -> tuple[int, int, Cursor]:
    return base.shared, -base.held.depth, base.seq


# ---------------------------------------------------------------- the head


TokenText = Callable[[int], str]
"""Gives the text of one token. The concatenated texts of a turn's tokens should usually equal the turn's text."""

S = TypeVar("S", bound=PackedRows)


class Head(Generic[S]):
    """Inserts rows into one segment. After a failed transaction close it and open another, because its caches may be wrong."""

    def __init__(self, segment: S, texts: dict[int, str]) -> None:
        self.segment = segment
        self.made_at = segment.made_at()
        self._texts = texts
        self._bases = Bases()
        self._training = Training()
        self._numbers: dict[PolicyVersion, int] = {}
        self._dictionaries = 0
        self._looked_up: set[str] = set()  # parents looked up since the last insert
        segment.read_all_pieces()

    def is_full(self, config: RecordConfig, now: float, newest: Cursor, size: int) -> bool:
        """Return True if a new segment must follow the row `newest`; `size` is in bytes. An empty segment is never full."""
        rows = newest - self.segment.first + 1
        return rows > 0 and (
            rows >= config.segment_rows
            or size >= config.segment_mb * 1e6
            or not 0 <= now - self.made_at < 3600 * config.segment_hours  # negative: created while the clock was ahead
            or not self.segment.is_current
        )

    def prefetch(self, rows: Sequence[Ready], token_text: TokenText | None) -> None:
        """Query what these rows need before the transaction, so that the lock is held for less time. Optional."""
        fresh: dict[int, str] = {}
        for row in rows:
            if row.turn is None:
                continue
            turn = cast("Turn", row.row)
            self._load_parent(turn.parent, row.secret)
            if turn.text and token_text is not None and row.secret is None:
                fresh.update(self._new_token_texts(turn.text, turn.sampled_ids, token_text) or ())
        if fresh:
            self._add_token_texts(list(fresh.items()))

    def insert(self, rows: Sequence[tuple[Ready, int]], newest: Cursor, token_text: TokenText | None) -> None:
        """Write rows with their identity keys, in this order, after the row `newest`. Raises the driver's errors."""
        self._use_dictionaries()
        values = [
            self._turn_columns(row, seq, token_text) if row.turn else self._row_columns(row, seq)
            for seq, (row, _) in enumerate(rows, newest + 1)
        ]
        self.segment.put(rows, values)
        self._looked_up.clear()

    # ------------------------------------------------------------ the columns of one row

    def _row_columns(self, row: Ready, seq: Cursor) -> tuple[Any, ...]:
        body = self._compress(Use.ROWS, row.body, None)
        if not row.kind.said:
            return seq, body
        if row.said is None:
            return seq, body, None, None
        said = self._compress(Use.TEXT, row.said, row.secret)
        return seq, body, row.secret, self.segment.encrypt(row.secret, "said", seq, said)

    def _turn_columns(self, row: Ready, seq: Cursor, token_text: TokenText | None) -> tuple[Any, ...]:
        turn, prepared, secret = cast("Turn", row.row), cast("turns.Prepared", row.turn), row.secret
        if secret is not None:
            prepared = turns.under_key(prepared, turn)
        segment, ids, prompt = self.segment, prepared.ids, len(turn.prompt_ids)
        self._load_parent(turn.parent, secret)
        asked = ids[: 4 * prompt]
        hashes = hashes_of(asked, secret)
        base = self._bases.best(asked, secret, turn.parent, hashes)
        gap, depth, shared = (0, 0, 0) if base is None else (seq - base.seq, base.held.depth + 1, base.shared)
        width, own = narrow(ids[4 * shared :])
        self._sample(Use.TOKENS, own, secret)
        tokens = turns.pack_tokens(segment.shrinker, PackedTokens(gap, depth, shared, prompt, width, own))
        policies = [self._number(span.policy) for span in turn.spans]
        head = turns.pack_head(prepared, turn, policies, explicit=secret is not None)
        text = self._text(turn.text, ids[4 * prompt :], secret, token_text)
        self._bases.add(seq, turn.id, Held(ids, prompt, depth, secret), hashes)
        return (
            seq,
            secret,
            self._compress(Use.ROWS, head, None),
            segment.encrypt(secret, "tokens", seq, tokens),
            segment.encrypt(secret, "logprobs", seq, turns.pack_logprobs_column(prepared)),
            segment.encrypt(secret, "text", seq, text) if isinstance(text, bytes) else text,
            segment.encrypt(secret, "routes", seq, turn.routes) if turn.routes else None,
        )

    def _load_parent(self, parent: str | None, secret: int | None) -> None:
        """Load the parent's ids into the cache of bases, if the parent is in this segment under the same key."""
        if parent is None or parent in self._bases or parent in self._looked_up:
            return
        place, held = self.segment.locate(TURNS, (parent,)), None
        if place is not None:
            with suppress(KeyDestroyed, *DAMAGE):  # an unreadable parent is no base, and must not fail other turns
                held = self.segment.tokens(place)
        self._looked_up.add(parent)  # after the query, because a head whose query failed may be used again
        if place is not None and held is not None and held.secret == secret:
            self._bases.add(place, parent, held)

    def _text(self, text: str, sampled: bytes, secret: int | None, token_text: TokenText | None) -> bytes | int | None:
        """Return the stored form of a text: None if the tokens spell it, n if it is their first n characters, else packed text.

        Under a key it is always packed text, because the texts of tokens are stored unencrypted and would reveal which tokens a person got.
        """
        if not text:
            return 0
        if secret is not None:
            return self._compress(Use.TEXT, text.encode(), secret)
        tokens = unflat(sampled)
        spelt = self.segment.known_text(tokens)
        if (
            spelt is None
            and token_text is not None
            and (rows := self._new_token_texts(text, tokens, token_text)) is not None
        ):
            self._add_token_texts(rows)
            spelt = self.segment.known_text(tokens)
        if spelt is not None and spelt.startswith(text):
            return None if len(spelt) == len(text) else len(text)
        return self._compress(Use.TEXT, text.encode(), None)

    def _new_token_texts(self, text: str, tokens: Sequence[int], token_text: TokenText) -> list[tuple[int, str]] | None:
        """Return the (token, text) pairs that are new to the segment; None unless the concatenated texts of `tokens` begin with `text`."""
        pieces, texts = self.segment.pieces, self._texts
        fresh = {token for token in tokens if token not in pieces}
        try:
            for token in fresh.difference(texts):
                texts[token] = token_text(token)
            rows = [(token, texts[token]) for token in fresh]
            for _, piece in rows:
                piece.encode()
        except Exception:  # noqa: BLE001 - the tokenizer does not know a token, so the text itself is stored
            return None
        spelt = "".join(texts[token] if token in fresh else pieces[token] for token in tokens)
        return rows if spelt.startswith(text) else None

    def _add_token_texts(self, rows: Sequence[tuple[int, str]]) -> None:
        """Add texts of tokens to the segment: to the database first, because a head whose query failed may be used again."""
        if self.segment.put_pieces(rows) == len(rows):
            self.segment.pieces.update(rows)
        else:  # another process has added some of them, perhaps with another tokenizer
            self.segment.read_all_pieces()

    def _number(self, policy: PolicyVersion) -> int:
        """Return the segment's number for a policy version."""
        if policy not in self._numbers:
            self._numbers[policy] = self.segment.put_policy(policy)
        return self._numbers[policy]

    # ------------------------------------------------------------ dictionaries

    def _compress(self, use: Use, plain: bytes, secret: int | None) -> bytes:
        self._sample(use, plain, secret)
        return self.segment.shrinker.pack(use, plain)

    def _sample(self, use: Use, plain: bytes, secret: int | None) -> None:
        """Collect a training sample for a dictionary, unless the bytes will be encrypted."""
        if secret is None and not self.segment.shrinker.has(use):
            self._training.saw(use, plain)

    def _use_dictionaries(self) -> None:
        """Load dictionaries that other processes trained; store those that only this process has trained."""
        shrinker = self.segment.shrinker
        newest = self.segment.newest_dictionary()
        if newest != self._dictionaries:
            shrinker.refresh()
        for use, body in self._training.take().items():
            if not shrinker.has(use):
                newest += 1
                self.segment.put_dictionary(newest, use, body)
                shrinker.refresh()
        self._dictionaries = newest
