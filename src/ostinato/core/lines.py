"""Text in lines: JSON is written without any character that some reader treats as a line end; text is split at line feeds only.

Python's `str.splitlines`, and clients that use it, also end a line at U+0085, U+2028, U+2029 and some control characters. JSON escapes
the control characters anyway.
"""

from __future__ import annotations

import io
import json
from typing import Any

_LINE_ENDS = (("\u0085", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_line(value: Any) -> str:
    """Return compact JSON that every reader takes as one line. Raises ValueError for NaN and infinity, TypeError for what JSON lacks."""
    return one_line(_encode(value))


def one_line(text: str) -> str:
    r"""Escape in a JSON text the characters at which some readers end a line; line feeds between its values stay.

    Example: ``one_line('["a\u2028"]') == r'["a\u2028"]'``
    """
    if not text.isascii():
        for end, escape in _LINE_ENDS:
            text = text.replace(end, escape)
    return text


def lines_of(text: str) -> list[str]:
    r"""Return the lines of a text, which end at \n or \r\n; the last may lack its end.

    Example: ``lines_of("a\u2028b\r\nc\n") == ["a\u2028b", "c"]``
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def whole_lines(text: str) -> list[str]:
    r"""Return the lines of a text with their ends; they end at \n alone, as in a diff or for `sed`."""
    return io.StringIO(text, newline="\n").readlines()
