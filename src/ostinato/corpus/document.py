"""A file of a corpus, before tokenization."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text file. `source` names the package, directory or archive that it comes from; `path` is relative to that.

    Example: ``Document(source="tabulate-0.10.0", path="tabulate/__init__.py", licence="MIT", text="...")``
    """

    source: str
    path: str
    licence: str
    text: str

    @property
    def digest(self) -> int:
        """63 bits of the text's BLAKE2b hash, which depends on the text only."""
        return int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=8).digest(), "big") >> 1
