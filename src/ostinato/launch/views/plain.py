"""Untrusted text, made safe to print on a terminal."""

from __future__ import annotations


def plain(text: str) -> str:
    """Escapes control characters as Python writes them, so that a terminal does not obey them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
