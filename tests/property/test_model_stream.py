"""Whatever ids come, however they are split: the text shown is the decoded text, cut where the first stop string begins."""

import functools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ostinato.core.errors import BadRequest
from ostinato.model.stream import _RUN, TextStream
from ostinato.testing.tiny import byte_tokenizer

CORE = byte_tokenizer().backend_tokenizer


@functools.cache
def byte_ids():
    """Token id of each byte, through the decoder itself: ids 0 to 255 are the bytes in some order."""
    from tokenizers.pre_tokenizers import ByteLevel

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    symbol = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}
    assert set(symbol.values()) == set(ByteLevel.alphabet())
    return [CORE.token_to_id(symbol[b]) for b in range(256)]


def decode(ids):
    return CORE.decode(list(ids), skip_special_tokens=True)


def ids_of(data):
    return [byte_ids()[b] for b in data]


def reference(ids, stops):
    """Cut before the stop string that is complete earliest (of those that end together, the longest)."""
    text = decode(ids)
    hits = [(m.start() + len(s), m.start()) for s in stops for m in [re.search(re.escape(s), text)] if m]
    return (text[: min(hits)[1]], True) if hits else (text, False)


def run(ids, stops, splits):
    stream, shown, last = TextStream(decode, stops), [], 0
    for cut in [*sorted({c for c in splits if c <= len(ids)}), len(ids)]:
        shown.append(stream.feed(ids[last:cut]))
        last = cut
    shown.append(stream.flush())
    return shown, stream.stopped


BYTES = st.one_of(
    st.binary(max_size=60),
    st.text(alphabet="aé€😀\ufffd", max_size=30).map(str.encode),
    st.lists(
        st.sampled_from([b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe2", b"\x82", b"\xac", b"a", b"\xff"]), max_size=60
    ).map(b"".join),
)
STOPS = st.lists(
    st.one_of(st.text(alphabet="ab\n", min_size=1, max_size=4), st.sampled_from(["é", "€a", "😀", "\ufffd"])),
    max_size=4,
)


@given(
    data=BYTES,
    stops=STOPS,
    splits=st.lists(st.integers(0, 80)),
    special=st.lists(st.tuples(st.integers(0, 80), st.just(258)), max_size=12),
)
@example(data=b"\xff" * 60, stops=[], splits=list(range(60)), special=[])
@example(data=b"\xf0\x9f\x98" * 20, stops=["\ufffd"], splits=list(range(60)), special=[])
@example(data=b"ab" * 30 + b"abc", stops=["abc", "bc"], splits=list(range(63)), special=[(5, 258)])
@example(data=b"a" * 20 + b"\xe2\x82\xac", stops=[], splits=list(range(40)), special=[(22, 258)] * 9)
@example(data=b"\xff" * 24 + b"\xe2\x82\xac!", stops=[], splits=list(range(40)), special=[])
@example(data=b"\xff" * 25 + b"ab", stops=[], splits=list(range(60)), special=[(24, 258)] * 12)
@example(data=b"aba", stops=["aba", "b"], splits=[], special=[])
def test_shown_text_is_the_decoded_text_cut_at_the_first_stop(data, stops, splits, special):
    ids = ids_of(data)
    for at, token in special:
        ids.insert(min(at, len(ids)), token)
    shown, stopped = run(ids, stops, splits)
    assert ("".join(shown), stopped) == reference(ids, stops)
    one_by_one, _ = run(ids, stops, range(len(ids)))
    assert "".join(one_by_one) == "".join(shown)


@given(data=BYTES, stops=STOPS)
def test_nothing_is_ever_taken_back_or_shown_too_early(data, stops):
    """Every text shown so far must be right for every way the sample may go on; a long held text must be a stop's beginning."""
    ids = ids_of(data)
    stream, shown = TextStream(decode, stops), ""
    for n, token in enumerate(ids, 1):
        shown += stream.feed([token])
        for ending in ([], ids_of(b"a"), ids_of(b"\x80"), ids_of(b"bb\nab")):
            assert reference(ids[:n] + ending, stops)[0].startswith(shown)
        if not stream.stopped:
            held = decode(ids[:n])[len(shown) :]
            assert len(held.rstrip("\ufffd")) <= max((len(s) for s in stops), default=1) - 1
            assert len(held) <= max((len(s) for s in stops), default=1) - 1 + _RUN


WORDS = ["\u2581a", "\u2581", "b", "\u2581\u2581c", "<0xE2>", "<0x82>", "<0xAC>"]


@functools.cache
def sentencepiece_like():
    """Decodes as Llama-2's tokenizer does: byte tokens are joined, the text's first space is dropped."""
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[]))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return core


@given(st.lists(st.sampled_from([(0,), (1,), (2,), (3,), (4, 5, 6)]), max_size=30))
@example([(4, 5, 6)] * 12)
def test_decoders_that_strip_and_join_are_followed_too(groups):
    ids = [i for group in groups for i in group]
    stream = TextStream(lambda some: sentencepiece_like().decode(list(some)), [])
    assert "".join(stream.feed([i]) for i in ids) + stream.flush() == sentencepiece_like().decode(ids)


def test_text_is_shown_at_once_when_nothing_can_change():
    stream = TextStream(decode, ["STOP"])
    assert [stream.feed(ids_of(part)) for part in (b"a", b"S", b"T", b"X", b"\xe2", b"\x82", b"\xac", b"ST")] == (
        ["a", "", "", "STX", "", "", "€", ""]
    )
    assert stream.feed(ids_of(b"OP and more")) == ""
    assert stream.stopped
    assert stream.feed(ids_of(b"x")) == stream.flush() == ""


def test_a_call_decodes_a_bounded_window():
    longest = 0

    def counting(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    stream = TextStream(counting, ["never"])
    data = ("né€😀 " * 400).encode() + b"\xff\xf0\x9f" * 300
    assert "".join(stream.feed([token]) for token in ids_of(data)) + stream.flush() == data.decode(errors="replace")
    assert longest <= 2 * _RUN


def test_an_empty_stop_string_is_refused():
    with pytest.raises(BadRequest, match="empty"):
        TextStream(decode, ["a", ""])
