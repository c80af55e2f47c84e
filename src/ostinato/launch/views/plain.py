"""Text of others on a terminal."""

from __future__ import annotations


def plain(text: str) -> str:
    """Without what a terminal would obey: control characters stand as they are written in Python."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
