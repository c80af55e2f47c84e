"""Masking twice masks once, what is restored is what was said, and where an answer is cut decides nothing."""

import itertools
import json
import re

from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.core.conversation import Conversation, Message, Role, ToolCall
from ostinato.serve.config import PrivacyConfig
from ostinato.serve.scrub import Scrubbing, Unmasker, unmasked, unmasked_json, unmasked_message

SCRUBBING = Scrubbing(PrivacyConfig(scrub="mask", scrub_ignored=()), b"0123456789abcdef")
PLACES = {
    "⟨EMAIL_3f2a91c4⟩": "ann@example.com",
    "⟨EMAIL_3f2a91c400112233⟩": "b⟩@c.de",
    "⟨PASSWORD_00000000⟩": 'q"\\⟨EMAIL_',
}
ANY = re.compile("|".join(map(re.escape, PLACES)))

FRAGMENTS = st.sampled_from([
    *PLACES, *PLACES.values(), "⟨", "⟩", "⟨EMAIL_", "3f2a91c4", "⟨EMAIL_3f2a91c4", "⟨EMAIL_3f2a91c40011", " ", "_", "\\", '"', "x",
])  # fmt: skip
VALUES = st.sampled_from([
    "ann.lee@example.com", "a@b.de", "4111 1111 1111 1111", "4111111111111111", "+49 30 1234567", "(415) 555-1234", "415-555-1234",
    "DE89 3704 0044 0532 0130 00", "DE89370400440532013000", "123-45-6789", "93.184.216.34", "2001:db8:85a3::8a2e:370:7334",
    "AKIAIOSFODNN7EXAMPLQ", "ghp_" + "a1B2c3D4e5F6" * 3, "sk-" + "aB3dE5gH7jK9mN1pQ3sT", "xoxb-123456789012-abcDEF4567890",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow1bAAKCAQEA" * 8 + "\n-----END RSA PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----",
    'password = "Hunter2xyz"', "PASSWORD=Zx81spectrum!", "my password is Hunter2xyz.", "postgres://admin:s3cr3tPw@db.example.com/x",
    "Authorization: Bearer abcdefghij0123456789", "AccountKey=" + "aB3+" * 20 + "==", "Hunter2xyz", "44051401458", "12345678Z",
])  # fmt: skip
BETWEEN = st.sampled_from([
    "", " ", "\n", ".", ", ", "-", "_", ":", "/", "@", "=", '"', "'", "\\", "⟨", "⟩", "é", "\ud800", "a", "7", "Z", "\\n",
    "⟨EMAIL_3f2a91c4⟩",
])  # fmt: skip
TEXTS = st.lists(st.tuples(VALUES | BETWEEN, BETWEEN), max_size=8).map(lambda pairs: "".join(a + b for a, b in pairs))
PLAIN = TEXTS.filter(lambda text: "⟨" not in text)


def one():
    return SCRUBBING.person("acme", "ann")


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(text=st.lists(FRAGMENTS, max_size=12).map("".join), places=st.lists(st.integers(0, 500), max_size=30))
@example(text="⟨⟨EMAIL_3f2a91c4⟩⟩", places=[])
def test_an_answer_is_restored_the_same_wherever_it_is_cut(text, places):
    whole = ANY.sub(lambda found: PLACES[found[0]], text)
    for pieces in (cut(text, places), list(text), [text]):
        stream = Unmasker(PLACES)
        assert "".join([*(stream.feed(piece) for piece in pieces), stream.flush()]) == whole


@given(text=st.lists(FRAGMENTS.filter(lambda each: each not in ("\\", '"', *PLACES.values())), max_size=9).map("".join))
def test_in_json_values_are_escaped(text):
    told = json.loads(unmasked(json.dumps({"a": text}, ensure_ascii=False), PLACES, escaped=True))
    assert told == {"a": unmasked(text, PLACES)}
    for ascii in (True, False):
        assert json.loads(unmasked_json(json.dumps({"a": text}, ensure_ascii=ascii), PLACES)) == told


@given(text=TEXTS)
def test_masking_twice_masks_once(text):
    masked = one().text(text)
    again = one()
    assert again.text(masked) == masked
    assert not again.values


@given(text=PLAIN)
def test_what_is_restored_is_what_was_said(text):
    scrubber = one()
    assert unmasked(scrubber.text(text), scrubber.values) == text


def message(text):
    call = ToolCall(id="c", name="f", arguments=json.dumps({"a": text, "password": "Hunter2xyz"}))
    return Message(role=Role.ASSISTANT, text=text, calls=(call,))


@given(texts=st.lists(PLAIN, min_size=1, max_size=4))
def test_a_conversation_is_masked_once_and_restored(texts):
    told = Conversation(messages=tuple(map(message, texts)))
    scrubber, again = one(), one()
    masked = scrubber.conversation(told)
    assert again.conversation(masked) == masked
    for before, after in zip(told.messages, masked.messages, strict=True):
        back = unmasked_message(after, scrubber.values)
        assert back.text == before.text
        assert json.loads(back.calls[0].arguments) == json.loads(before.calls[0].arguments)


@given(texts=st.lists(PLAIN.filter(lambda text: "ssword" not in text.lower()), min_size=2, max_size=4))
def test_what_comes_later_changes_nothing_before(texts):
    told = tuple(Message(role=Role.USER, text=text) for text in texts)
    whole = one().conversation(Conversation(messages=told)).messages
    assert one().conversation(Conversation(messages=told[:-1])).messages == whole[:-1]
