"""Decides from a package's metadata whether its licence allows training without conditions on the result.

If the metadata states no licence that is known here, the answer is no.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PERMISSIVE = {
    "0bsd", "apache-2.0", "blueoak-1.0.0", "bsd-1-clause", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc0-1.0", "cnri-python",
    "hpnd", "isc", "mit", "mit-0", "mit-cmu", "ncsa", "postgresql", "psf-2.0", "python-2.0", "python-2.0.1", "unlicense", "upl-1.0",
    "x11", "zlib", "zpl-2.1",
}  # fmt: skip
"""SPDX identifiers, in lower case."""

_CLASSIFIED = {
    "apache software license": "apache-2.0",
    "bsd license": "bsd-3-clause",
    "boost software license 1.0 (bsl-1.0)": "bsl-1.0",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "cc0-1.0",
    "historical permission notice and disclaimer (hpnd)": "hpnd",
    "isc license (iscl)": "isc",
    "mit license": "mit",
    "mit no attribution license (mit-0)": "mit-0",
    "python software foundation license": "psf-2.0",
    "the unlicense (unlicense)": "unlicense",
    "universal permissive license (upl)": "upl-1.0",
    "zero-clause bsd (0bsd)": "0bsd",
    "zlib/libpng license": "zlib",
    "zope public license": "zpl-2.1",
}
_WRITTEN = {
    "apache": "apache-2.0", "apache 2": "apache-2.0", "apache 2.0": "apache-2.0", "apache license 2.0": "apache-2.0",
    "apache license, version 2.0": "apache-2.0", "apache software license": "apache-2.0", "bsd": "bsd-3-clause",
    "bsd license": "bsd-3-clause", "3-clause bsd": "bsd-3-clause", "bsd 3-clause": "bsd-3-clause", "new bsd": "bsd-3-clause",
    "isc license": "isc", "mit license": "mit", "the mit license": "mit", "psf": "psf-2.0",
}  # fmt: skip
_SPDX = re.compile(r"\(|\)|[A-Za-z0-9.+-]+")


def permissive_licence(metadata: Mapping[str, Sequence[str]]) -> tuple[str, bool]:
    """The licence that a package's core metadata states, and whether it is a permissive one.

    `metadata`: field name -> values, such as {"License-Expression": ["MIT"], "Classifier": [...], "License": [...]}. An expression takes
    precedence over classifiers, and classifiers over the free text; all of several classifiers must be permissive.

    Example: ``permissive_licence({"License-Expression": ["MIT OR GPL-2.0-only"]})`` is ``("MIT OR GPL-2.0-only", True)``.
    """
    for expression in metadata.get("License-Expression", ()):
        return expression, allows(expression)
    stated = [each for each in metadata.get("Classifier", ()) if each.startswith("License ::")]
    named = [each.rpartition("::")[2].strip() for each in stated if each.count("::") > 1 or "OSI" not in each]
    if named:
        return ", ".join(named), all(each.lower() in _CLASSIFIED for each in named)
    for text in metadata.get("License", ()):
        short = " ".join(text.split())
        if len(short) <= 80 and short:
            return short, short.lower() in _WRITTEN or allows(short)
    return "none stated", False


def allows(expression: str) -> bool:
    """True if an SPDX expression permits a permissive choice: one side of an OR, both sides of an AND. Unknown or malformed: False.

    Example: ``allows("(MIT OR GPL-3.0-only) AND BSD-3-Clause")`` is True. An exception (WITH) only ever adds permissions.
    """
    words = _SPDX.findall(expression)
    if "".join(words) != "".join(expression.split()):
        return False
    try:
        holds, rest = _either(words)
    except (IndexError, RecursionError):
        return False
    return holds and not rest


def _either(words: list[str]) -> tuple[bool, list[str]]:
    holds, rest = _both(words)
    while rest and rest[0].upper() == "OR":
        other, rest = _both(rest[1:])
        holds = holds or other
    return holds, rest


def _both(words: list[str]) -> tuple[bool, list[str]]:
    holds, rest = _one(words)
    while rest and rest[0].upper() == "AND":
        other, rest = _one(rest[1:])
        holds = holds and other
    return holds, rest


def _one(words: list[str]) -> tuple[bool, list[str]]:
    if words[0] == "(":
        holds, rest = _either(words[1:])
        return holds and rest[0] == ")", rest[1:]
    rest = words[1:]
    if rest and rest[0].upper() == "WITH":
        rest = rest[2:]
    return words[0].lower() in PERMISSIVE, rest
