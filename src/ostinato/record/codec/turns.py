"""A turn <-> its columns: a JSON head, packed ids, packed log-probabilities, and its text if the tokens do not spell it.

Behind the log-probabilities stand, each only if there is any, the style, the steering, the nucleus sets, the parsed tool calls and the
grammar: what is encrypted with the turn.

Packing has two steps. `prepare` checks a row of any kind and packs it as far as possible without knowing its segment, so it can refuse a
turn before any lock is taken. The rest depends on the segment that the turn is written to: the numbers of its policies there, its base,
and the texts of its tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ostinato.core.errors import BadRequest
from ostinato.core.records import Identity, ParsedCall, Pick, PolicyVersion, Row, Span, Turn, identity
from ostinato.core.seams import Cursor
from ostinato.core.steering import CLIP, Steered
from ostinato.record.codec.kinds import TURNS, Kind, dump, key_of, kind_of, load, real, text, to_json, whole
from ostinato.record.codec.shrink import Shrinker, Use
from ostinato.record.codec.tokens import (
    PackedTokens,
    checked,
    flat,
    pack_logprobs,
    read_ints,
    unflat,
    unpack_logprobs,
    widen,
    write_ints,
)

_WRITTEN = b"\1"  # precedes a grammar together with what else the caller wrote; no compressed grammar begins with it
_TENANT, _USER = TURNS.body.index("tenant"), TURNS.body.index("user")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that can be stored. `ids`: flat, prompt first. `logprobs`: packed. `grammar`: what constrained them, compressed; or empty.
    `beside`: the style, the steering, the nucleus sets and the parsed tool calls, packed; empty for none.
    """

    head: bytes
    ids: bytes
    logprobs: bytes
    grammar: bytes
    beside: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """A turn's ids in memory: `ids` flat, prompt first; `prompt` ids are the prompt; `depth` of its chain of bases; key `secret`."""

    ids: bytes
    prompt: int
    depth: int
    secret: int | None


class KeyDestroyed(Exception):
    """The requested value is encrypted under a key that was destroyed."""


class TurnSegment(Protocol):
    """The segment that holds a turn, as seen by packing."""

    shrinker: Shrinker

    @property
    def knows_calls(self) -> bool:
        """True if a turn without parsed calls had none; False if they were not stored."""
        ...

    def reveal(self, secret: int | None, column: str, seq: Cursor, blob: bytes) -> bytes:
        """The decrypted value of a column. Raises KeyDestroyed."""
        ...

    def tokens(self, seq: Cursor) -> Held:
        """A turn's ids, including those from its bases. Raises KeyDestroyed."""
        ...

    def hold(self, seq: Cursor, held: Held) -> None:
        """Keep a turn's ids in memory for turns that have it as their base."""
        ...

    def policy(self, number: int) -> PolicyVersion:
        """The policy version with this number in the segment."""
        ...

    def spell(self, ids: bytes) -> str | None:
        """The concatenated texts of tokens; None if any of them has no text."""
        ...


def prepare_turn(turn: Turn) -> Prepared:
    """Check and pack a turn. Raises BadRequest, which names the field that cannot be stored."""
    if not turn.counts and turn != turn.without_words():
        raise BadRequest("Turn.consent is 'never', and it holds words; store `turn.without_words()`", field="consent")
    head = dump(TURNS, turn, TURNS.body)
    field = "prompt_ids"
    try:
        ids = checked(turn.packed_prompt) if turn.packed_prompt else flat(turn.prompt_ids)
        field = "sampled_ids"
        ids += flat(turn.sampled_ids)
        field = "logprobs"
        logprobs = pack_logprobs(turn.logprobs)
        field = "sampling"
        grammar = text(turn.sampling.grammar).encode()
        field = "spans"
        for span in turn.spans:
            whole(span.tokens)
            text(span.policy.hash).encode()
            if not -(1 << 63) <= whole(span.policy.number) < 1 << 63:
                raise ValueError("a policy's number does not fit in 64 bits")
        field = "text"
        text(turn.text).encode()
        field = "routes"
        bytes(turn.routes)
        beside = b""
        for part in _BESIDE:
            field = part.field
            if (value := getattr(turn, field)) != part.none:
                packed = part.pack(value)
                beside += part.mark + write_ints(len(packed)) + packed
    except (ValueError, TypeError) as error:
        raise BadRequest(f"Turn.{field} cannot be stored: {error}", field=field) from error
    return Prepared(head, ids, logprobs, zlib.compress(grammar) if grammar else b"", beside)


@dataclass(frozen=True, slots=True)
class _Beside:
    """A field of a turn that is stored behind its log-probabilities: `mark`, the length and the packed value; nothing for `none`.

    `pack` raises TypeError, ValueError; `unpack` ValueError, IndexError, TypeError.
    """

    field: str
    mark: bytes
    none: Any
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]

    def split(self, packed: bytes) -> tuple[Any, bytes]:
        """The value at the beginning of `packed`, and the bytes that follow."""
        if packed[:1] != self.mark:
            return self.none, packed
        (size,), at = read_ints(packed[1:], 1)
        end = 1 + at + size
        return self.unpack(packed[1 + at : end]), packed[end:]


def _pack_style(style: Pick) -> bytes:
    odds = {text(arm): real(chance) for arm, chance in style.odds.items()}
    return to_json([text(style.arm), odds]).encode()


def _unpack_style(packed: bytes) -> Pick:
    arm, odds = json.loads(packed)
    return Pick(arm=arm, odds=odds)


def _pack_steered(steered: Steered) -> bytes:
    numbers = [real(steered.cap), real(steered.budget), whole(steered.tokens), real(steered.kl)]
    vectors = [[real(value) for value in values] for values in (steered.dials, steered.features)]
    more = [[[whole(place) for place in gap] for gap in steered.gaps], real(steered.clip)]
    usual = not steered.gaps and steered.clip == CLIP
    return to_json([text(steered.basis), *numbers, *vectors, *([] if usual else more)]).encode()


def _unpack_steered(packed: bytes) -> Steered:
    basis, cap, budget, tokens, kl, dials, features, *more = json.loads(packed)
    return Steered(
        basis=basis,
        dials=tuple(dials),
        cap=cap,
        budget=budget,
        tokens=tokens,
        kl=kl,
        features=tuple(features),
        gaps=tuple((start, stop) for start, stop in (more[0] if more else [])),
        clip=more[1] if more else CLIP,
    )


def _pack_nucleus(nucleus: bytes) -> bytes:
    return zlib.compress(nucleus, 1)  # quick, as all turns are packed by one thread


def _unpack_nucleus(packed: bytes) -> bytes:
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise ValueError(f"nucleus sets cannot be read: {error}") from error


def _pack_calls(calls: tuple[ParsedCall, ...] | None) -> bytes:
    """Empty if the calls are not known."""
    listed = [[text(call.name), whole(call.start), whole(call.end)] for call in calls or ()]
    return to_json(listed).encode() if listed else b""


def _unpack_calls(packed: bytes) -> tuple[ParsedCall, ...] | None:
    listed = json.loads(packed) if packed else ()
    return tuple(ParsedCall(name=name, start=start, end=end) for name, start, end in listed) or None


_BESIDE = (
    _Beside("style", b"\5", None, _pack_style, _unpack_style),
    _Beside("steered", b"\4", None, _pack_steered, _unpack_steered),
    _Beside("nucleus", b"\3", b"", _pack_nucleus, _unpack_nucleus),
    _Beside("calls", b"\2", (), _pack_calls, _unpack_calls),
)


def under_key(prepared: Prepared, turn: Turn) -> Prepared:
    """The same turn in the form in which it is encrypted: what its caller wrote of the sampling is beside the grammar, not in the head.

    These are the stop strings, the logit bias and the penalties.
    """
    asked = turn.sampling
    left = replace(asked, stop=(), logit_bias=(), presence_penalty=0.0, frequency_penalty=0.0)
    if asked == left:
        return prepared
    bias = [[token, float(value)] for token, value in asked.logit_bias]
    penalties = [float(asked.presence_penalty), float(asked.frequency_penalty)]
    written = to_json([asked.grammar, list(asked.stop), bias, *penalties]).encode()
    head = dump(TURNS, replace(turn, sampling=left), TURNS.body)
    return replace(prepared, head=head, grammar=_WRITTEN + zlib.compress(written))


# ---------------------------------------------------------------- columns


def pack_head(prepared: Prepared, turn: Turn, policies: list[int], *, explicit: bool) -> bytes:
    """The head's JSON, spans first. `policies` are the numbers of the spans' policies in the segment.

    A single span over all sampled tokens is stored as its policy alone, unless the number of tokens must be readable without the tokens
    themselves (`explicit`).
    """
    tokens = [span.tokens for span in turn.spans]
    plain = len(tokens) == 1 and tokens[0] == len(turn.sampled_ids) == len(turn.logprobs) and not explicit
    spans = policies[0] if plain else [list(pair) for pair in zip(policies, tokens, strict=True)]
    return b"[" + to_json(spans).encode() + b"," + prepared.head[1:]


def head_id(plain: bytes) -> str:
    """The id of the turn whose head this is."""
    return json.loads(plain)[1]


def head_owner(plain: bytes) -> tuple[str, str]:
    """The tenant and the user of the turn whose head this is."""
    _, *values = json.loads(plain)
    return values[_TENANT], values[_USER]


def pack_logprobs_column(prepared: Prepared) -> bytes:
    """Log-probabilities, then the nucleus sets, the calls and the grammar. `unpack_logprobs` separates them; a zero byte stands for missing
    log-probabilities.
    """
    rest = prepared.beside + prepared.grammar
    return (prepared.logprobs or b"\0") + rest if rest else prepared.logprobs


def pack_tokens(shrinker: Shrinker, packed: PackedTokens) -> bytes:
    """A blob with a turn's own ids and the reference to its base."""
    body = shrinker.pack(Use.TOKENS, packed.ids)
    return write_ints(packed.gap, packed.depth, packed.shared, packed.prompt, packed.width) + body


def unpack_tokens(shrinker: Shrinker, blob: bytes) -> PackedTokens:
    """The inverse of `pack_tokens`."""
    (gap, depth, shared, prompt, width), at = read_ints(blob, 5)
    return PackedTokens(gap, depth, shared, prompt, width, shrinker.unpack(blob[at:]))


def decode(home: TurnSegment, stored: Any) -> Turn:
    """The turn of a stored row. If its key was destroyed it is redacted: without tokens, log-probabilities, text, routes and calls.

    Raises ValueError, IndexError, TypeError or KeyError for a damaged row.
    """
    seq, secret, head, tokens, logprobs, said, routes = stored
    spans, *values = json.loads(home.shrinker.unpack(head))
    fields = load(TURNS, TURNS.body, values)
    try:
        held = _ids(home, seq, secret, tokens)
        sampled = held.ids[4 * held.prompt :]
        numbers, beside = unpack_logprobs(home.reveal(secret, "logprobs", seq, logprobs))
        words = _text(home, seq, secret, said, sampled)
        ways = b"" if routes is None else home.reveal(secret, "routes", seq, routes)
    except KeyDestroyed:
        erased: dict[str, Any] = {"prompt_ids": (), "sampled_ids": (), "logprobs": (), "text": "", "calls": None}
        return Turn(**fields, **erased, spans=_spans(home, spans, 0))
    for part in _BESIDE:
        fields[part.field], beside = part.split(beside)
    if not fields["calls"] and not home.knows_calls:
        fields["calls"] = None
    grammar = beside
    if grammar:  # a call's grammar and stop strings may quote what was said, so they are erased with the tokens
        fields["sampling"] = replace(fields["sampling"], **_written(grammar))
    return Turn(
        **fields,
        prompt_ids=unflat(held.ids[: 4 * held.prompt]),
        sampled_ids=unflat(sampled),
        logprobs=numbers,
        spans=_spans(home, spans, len(numbers)),
        text=words,
        routes=ways,
    )


def _written(packed: bytes) -> dict[str, Any]:
    """The fields of the sampling that were written beside the log-probabilities. Raises ValueError."""
    try:
        if packed[:1] != _WRITTEN:
            return {"grammar": zlib.decompress(packed).decode()}
        grammar, stop, bias, *penalties = json.loads(zlib.decompress(packed[1:]))
    except zlib.error as error:
        raise ValueError(f"a grammar cannot be read: {error}") from error
    # before segments of format 4 the penalties were in the head
    found = dict(zip(("presence_penalty", "frequency_penalty"), penalties, strict=False))
    return {
        "grammar": grammar,
        "stop": tuple(stop),
        "logit_bias": tuple((token, value) for token, value in bias),
        **found,
    }


def _ids(home: TurnSegment, seq: Cursor, secret: int | None, blob: bytes) -> Held:
    packed = unpack_tokens(home.shrinker, home.reveal(secret, "tokens", seq, blob))
    ids = widen(packed.width, packed.ids)
    if packed.gap:
        ids = home.tokens(seq - packed.gap).ids[: 4 * packed.shared] + ids
    held = Held(ids, packed.prompt, packed.depth, secret)
    home.hold(seq, held)
    return held


def _spans(home: TurnSegment, spans: int | list[list[int]], tokens: int) -> tuple[Span, ...]:
    if isinstance(spans, int):
        return (Span(policy=home.policy(spans), tokens=tokens),)
    return tuple(Span(policy=home.policy(policy), tokens=count) for policy, count in spans)


def _text(home: TurnSegment, seq: Cursor, secret: int | None, said: int | bytes | None, sampled: bytes) -> str:
    """The turn's text. `said`: the packed text, or the number of characters of the tokens' text, or None for all of the tokens' text."""
    if isinstance(said, bytes):
        return home.shrinker.unpack(home.reveal(secret, "text", seq, said)).decode()
    if said == 0:
        return ""
    spelt = home.spell(sampled)
    if spelt is None:
        raise ValueError("its tokens have no text in this segment")
    return spelt[:said]


# ---------------------------------------------------------------- rows of any kind


@dataclass(slots=True)
class Ready:
    """A row that can be stored. `said`: what people wrote in it, unless it is a turn. `secret`: the number of the key that encrypts it."""

    kind: Kind
    row: Row
    identity: Identity
    key: int
    body: bytes
    said: bytes | None = None
    turn: Prepared | None = None
    secret: int | None = None

    @property
    def size(self) -> int:
        """Bytes, before repeated content is removed."""
        parts = [self.body, self.said or b""]
        if isinstance(self.row, Turn) and self.turn is not None:
            parts += [self.turn.ids, self.turn.logprobs, self.turn.grammar, self.turn.beside, self.row.routes]
            return sum(map(len, parts)) + len(self.row.text)
        return sum(map(len, parts))


def prepare(row: Row) -> Ready:
    """Check and pack a row. Raises BadRequest, which names the field that cannot be stored."""
    kind = kind_of(type(row))
    prepared = prepare_turn(row) if isinstance(row, Turn) else None
    body = dump(kind, row, kind.body) if prepared is None else prepared.head
    said = None
    if any(getattr(row, name) is not None for name in kind.said):
        said = dump(kind, row, kind.said)
    names = identity(row)
    try:
        key = key_of(kind, names)
    except UnicodeEncodeError as error:
        raise BadRequest(f"{kind.record.__name__} cannot be stored: {error}") from error
    return Ready(kind, row, names, key, body, said, prepared)
