"""The shape of a JSON text from its bytes alone: quotes and backslashes as a parser sees them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.errors import BadRequest, TooLarge
from ostinato.core.json_shape import check_json, outside_strings, shape_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='\\"[]{},:a'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='\\"[{,:b'), inner, max_size=4),
    max_leaves=20,
)


def slowly(data):
    """The bytes outside strings, one by one."""
    kept, within, slashes = [], False, 0
    for byte in data:
        if byte == ord('"') and slashes % 2 == 0:
            within = not within
        slashes = slashes + 1 if byte == ord("\\") else 0
        if not within:
            kept.append(byte)
    return bytes(kept)


@given(st.lists(st.sampled_from(list(b'\\\\\\"a[,')), max_size=24).map(bytes))
def test_strings_end_where_a_parser_ends_them(data):
    assert outside_strings(data).tobytes() == slowly(data)


def counted(value):
    """(levels, brackets that open and commas, fields) of a value that is JSON."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    levels, marks, fields = zip(*inner, strict=True) if inner else ((0,), (0,), (0,))
    own = len(value) if isinstance(value, dict) else 0
    return 1 + max(levels), 1 + max(len(value) - 1, 0) + sum(marks), own + sum(fields)


@given(JSON, st.booleans())
def test_the_shape_is_that_of_the_value(value, spaced):
    data = json.dumps(value, separators=(", ", ": ") if spaced else (",", ":")).encode()
    shape = shape_of(data)
    assert (shape.depth, shape.values, shape.names) == counted(value)


@given(st.lists(st.sampled_from(list(b'\\\\\\"[]{},:a')), max_size=24).map(bytes))
def test_the_shape_of_any_text_is_that_of_its_bytes_outside_strings(data):
    bare, depth, deepest = slowly(data), 0, 0
    for byte in bare:
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    opened = sum(byte in b"[{" for byte in bare)
    shape = shape_of(data)
    assert (shape.depth, shape.values, shape.names) == (deepest, opened + bare.count(b","), bare.count(b":"))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"[" * 9, BadRequest),
        (b'{"a":' * 9, BadRequest),
        (b"[" + b"1," * 200, TooLarge),
        (b'{"' + b'\\"' * 40_000 + b'": ' + b"9" * 200 + b"}", BadRequest),
    ],
)
def test_what_would_be_costly_is_refused(data, error):
    with pytest.raises(error):
        check_json(data, depth=8, values=100)


def test_brackets_within_a_string_count_for_nothing():
    check_json(json.dumps({"text": "[{" * 10_000 + '"\\' * 10_000 + "," * 10_000}).encode(), depth=8, values=100)
