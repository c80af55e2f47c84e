"""A turn <-> its columns: a JSON head, packed ids, packed log-probabilities, and its text if the tokens do not spell it.

The log-probabilities are followed by the optional fields that are encrypted with them: style, steering, nucleus sets, parsed tool calls and
grammar.

Packing has two steps. `prepare` checks a row of any kind and packs as much of it as is possible without knowing its segment, so that a bad
turn is refused before any lock is taken. The rest depends on the segment: its numbers for the turn's policies, the turn's base, and the
texts of its tokens.
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

# marks a grammar stored with the caller's other sampling options; no compressed grammar begins with it
_CALLER_TEXT = b"\1"
_TENANT, _USER = TURNS.body.index("tenant"), TURNS.body.index("user")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that can be stored. `ids`: flat, prompt first. `logprobs`: packed. `grammar`: compressed, with the caller's other sampling
    options if it is to be encrypted; empty for none. `beside`: style, steering, nucleus sets and parsed tool calls, packed; b""
    for none.
    """

    head: bytes
    ids: bytes
    logprobs: bytes
    grammar: bytes
    beside: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """A turn's ids in memory: `ids` flat, of which the first `prompt` are the prompt; `depth`: its chain of bases; `secret`: its key."""

    ids: bytes
    prompt: int
    depth: int
    secret: int | None


class KeyDestroyed(Exception):
    """The requested value is encrypted under a key that was destroyed."""


class TurnSegment(Protocol):
    """The segment that holds a turn, as the codec sees it."""

    shrinker: Shrinker

    @property
    def knows_calls(self) -> bool:
        """True if a turn without parsed tool calls had none; False if the segment does not store them."""
        ...

    def decrypt(self, secret: int | None, column: str, seq: Cursor, blob: bytes) -> bytes:
        """Return the decrypted value of a column. Raises KeyDestroyed."""
        ...

    def tokens(self, seq: Cursor) -> Held:
        """Return a turn's ids, including those from its bases. Raises KeyDestroyed."""
        ...

    def hold(self, seq: Cursor, held: Held) -> None:
        """Cache a turn's ids for turns that have it as their base."""
        ...

    def policy(self, number: int) -> PolicyVersion:
        """Return the policy version with this number in the segment."""
        ...

    def spell(self, ids: bytes) -> str | None:
        """Return the concatenated texts of tokens; None if any of them has no text."""
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
        for part in _OPTIONAL:
            field = part.field
            if (value := getattr(turn, field)) != part.none:
                packed = part.pack(value)
                beside += part.mark + write_ints(len(packed)) + packed
    except (ValueError, TypeError) as error:
        raise BadRequest(f"Turn.{field} cannot be stored: {error}", field=field) from error
    return Prepared(head, ids, logprobs, zlib.compress(grammar) if grammar else b"", beside)


@dataclass(frozen=True, slots=True)
class _OptionalField:
    """A field of a turn that follows its log-probabilities as `mark`, length and packed value. A field equal to `none` is left out.

    `pack` raises TypeError, ValueError; `unpack` ValueError, IndexError, TypeError.
    """

    field: str
    mark: bytes
    none: Any
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]

    def split(self, packed: bytes) -> tuple[Any, bytes]:
        """Return the value at the beginning of `packed`, and the bytes that follow."""
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
    return zlib.compress(nucleus, 1)  # fast, because one thread packs all turns


def _unpack_nucleus(packed: bytes) -> bytes:
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise ValueError(f"nucleus sets cannot be read: {error}") from error


def _pack_calls(calls: tuple[ParsedCall, ...] | None) -> bytes:
    """Return packed calls; empty if the calls are unknown."""
    listed = [[text(call.name), whole(call.start), whole(call.end)] for call in calls or ()]
    return to_json(listed).encode() if listed else b""


def _unpack_calls(packed: bytes) -> tuple[ParsedCall, ...] | None:
    listed = json.loads(packed) if packed else ()
    return tuple(ParsedCall(name=name, start=start, end=end) for name, start, end in listed) or None


_OPTIONAL = (
    _OptionalField("style", b"\5", None, _pack_style, _unpack_style),
    _OptionalField("steered", b"\4", None, _pack_steered, _unpack_steered),
    _OptionalField("nucleus", b"\3", b"", _pack_nucleus, _unpack_nucleus),
    _OptionalField("calls", b"\2", (), _pack_calls, _unpack_calls),
)


def under_key(prepared: Prepared, turn: Turn) -> Prepared:
    """Return the turn in the form for encryption: the caller's sampling options are stored with the grammar, not in the readable head.

    These options are the stop strings, the logit bias and the penalties.
    """
    asked = turn.sampling
    left = replace(asked, stop=(), logit_bias=(), presence_penalty=0.0, frequency_penalty=0.0)
    if asked == left:
        return prepared
    bias = [[token, float(value)] for token, value in asked.logit_bias]
    penalties = [float(asked.presence_penalty), float(asked.frequency_penalty)]
    written = to_json([asked.grammar, list(asked.stop), bias, *penalties]).encode()
    head = dump(TURNS, replace(turn, sampling=left), TURNS.body)
    return replace(prepared, head=head, grammar=_CALLER_TEXT + zlib.compress(written))


# ---------------------------------------------------------------- columns


def pack_head(prepared: Prepared, turn: Turn, policies: list[int], *, explicit: bool) -> bytes:
    """Return the head's JSON, spans first. `policies` are the segment's numbers for the spans' policies.

    A single span over all sampled tokens is stored as its policy alone, unless the number of tokens must be readable without the tokens
    themselves (`explicit`).
    """
    tokens = [span.tokens for span in turn.spans]
    plain = len(tokens) == 1 and tokens[0] == len(turn.sampled_ids) == len(turn.logprobs) and not explicit
    spans = policies[0] if plain else [list(pair) for pair in zip(policies, tokens, strict=True)]
    return b"[" + to_json(spans).encode() + b"," + prepared.head[1:]


def head_id(plain: bytes) -> str:
    """Return the id of the turn with this head."""
    return json.loads(plain)[1]


def head_owner(plain: bytes) -> tuple[str, str]:
    """Return the tenant and the user of the turn with this head."""
    _, *values = json.loads(plain)
    return values[_TENANT], values[_USER]


def pack_logprobs_column(prepared: Prepared) -> bytes:
    """Return the log-probabilities followed by the optional fields and the grammar. A zero byte stands for missing log-probabilities.

    `unpack_logprobs` separates them.
    """
    rest = prepared.beside + prepared.grammar
    return (prepared.logprobs or b"\0") + rest if rest else prepared.logprobs


def pack_tokens(shrinker: Shrinker, packed: PackedTokens) -> bytes:
    """Return a blob with the reference to a turn's base and the ids that it does not share."""
    body = shrinker.pack(Use.TOKENS, packed.ids)
    return write_ints(packed.gap, packed.depth, packed.shared, packed.prompt, packed.width) + body


def unpack_tokens(shrinker: Shrinker, blob: bytes) -> PackedTokens:
    """The inverse of `pack_tokens`."""
    (gap, depth, shared, prompt, width), at = read_ints(blob, 5)
    return PackedTokens(gap, depth, shared, prompt, width, shrinker.unpack(blob[at:]))


def decode(home: TurnSegment, stored: Any) -> Turn:
    """Return the turn of a stored row; redacted if its key was destroyed: without tokens, log-probabilities, text, routes and calls.

    Raises ValueError, IndexError, TypeError or KeyError for a damaged row.
    """
    seq, secret, head, tokens, logprobs, said, routes = stored
    spans, *values = json.loads(home.shrinker.unpack(head))
    fields = load(TURNS, TURNS.body, values)
    try:
        held = _ids(home, seq, secret, tokens)
        sampled = held.ids[4 * held.prompt :]
        numbers, beside = unpack_logprobs(home.decrypt(secret, "logprobs", seq, logprobs))
        words = _text(home, seq, secret, said, sampled)
        ways = b"" if routes is None else home.decrypt(secret, "routes", seq, routes)
    except KeyDestroyed:
        erased: dict[str, Any] = {"prompt_ids": (), "sampled_ids": (), "logprobs": (), "text": "", "calls": None}
        return Turn(**fields, **erased, spans=_spans(home, spans, 0))
    for part in _OPTIONAL:
        fields[part.field], beside = part.split(beside)
    if not fields["calls"] and not home.knows_calls:
        fields["calls"] = None
    grammar = beside
    if grammar:  # grammar and stop strings may quote user text, so a redacted turn has none
        fields["sampling"] = replace(fields["sampling"], **_caller_sampling(grammar))
    return Turn(
        **fields,
        prompt_ids=unflat(held.ids[: 4 * held.prompt]),
        sampled_ids=unflat(sampled),
        logprobs=numbers,
        spans=_spans(home, spans, len(numbers)),
        text=words,
        routes=ways,
    )


def _caller_sampling(packed: bytes) -> dict[str, Any]:
    """Return the sampling fields that are stored with the grammar. Raises ValueError."""
    try:
        if packed[:1] != _CALLER_TEXT:
            return {"grammar": zlib.decompress(packed).decode()}
        grammar, stop, bias, *penalties = json.loads(zlib.decompress(packed[1:]))
    except zlib.error as error:
        raise ValueError(f"a grammar cannot be read: {error}") from error
    # before segment format 4 the penalties were in the head
    found = dict(zip(("presence_penalty", "frequency_penalty"), penalties, strict=False))
    return {
        "grammar": grammar,
        "stop": tuple(stop),
        "logit_bias": tuple((token, value) for token, value in bias),
        **found,
    }


def _ids(home: TurnSegment, seq: Cursor, secret: int | None, blob: bytes) -> Held:
    packed = unpack_tokens(home.shrinker, home.decrypt(secret, "tokens", seq, blob))
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
    """Return the turn's text. `said`: the packed text; or n for the first n characters that its tokens spell; or None for all of them."""
    if isinstance(said, bytes):
        return home.shrinker.unpack(home.decrypt(secret, "text", seq, said)).decode()
    if said == 0:
        return ""
    spelt = home.spell(sampled)
    if spelt is None:
        raise ValueError("its tokens have no text in this segment")
    return spelt[:said]


# ---------------------------------------------------------------- rows of any kind


@dataclass(slots=True)
class Ready:
    """A checked row, ready to be stored. `said`: its user text, unless it is a turn. `secret`: the number of the key that encrypts it."""

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
        """Bytes before compression and delta encoding."""
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
