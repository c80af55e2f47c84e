"""Searches the files of a run for words: as they are, in what is compressed, and in databases as SQL sees them."""

import contextlib
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import pysqlite3.dbapi2

from ostinato.record.codec.shrink import Shrinker
from ostinato.record.codec.tokens import unflat, widen
from ostinato.record.codec.turns import unpack_tokens
from ostinato.record.folds import unpack_fold
from ostinato.record.segment import open_segment
from ostinato.testing.engine import decode


def values(path: Path) -> list[bytes]:
    """Everything in a database as SQL sees it, unpacked as far as it can be without keys; tokens as the text of bytes."""
    with contextlib.ExitStack() as stack:
        segment = stack.enter_context(open_segment(path)) if path.parent.name == "log" else None
        db = stack.enter_context(contextlib.closing(pysqlite3.dbapi2.connect(str(path))))
        found: list[bytes] = []
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            with contextlib.suppress(pysqlite3.dbapi2.DatabaseError):  # FTS5's own
                for value in (value for row in db.execute(f'SELECT * FROM "{table}"') for value in row):
                    found.append(value if isinstance(value, bytes) else str(value).encode())
                    if isinstance(value, bytes) and segment is not None:
                        found += unpacked(value, segment.shrinker)
    return found


def unpacked(value: bytes, shrinker: Shrinker) -> list[bytes]:
    """A column as it was before it was packed, in each way that it can be read."""
    found: list[bytes] = []
    with contextlib.suppress(Exception):
        found.append(shrinker.unpack(value))
    with contextlib.suppress(Exception):
        tokens = unpack_tokens(shrinker, value)
        found.append(decode(unflat(widen(tokens.width, tokens.ids))).encode())
    return found


def contents(root: Path) -> dict[str, bytes]:
    """The files of a run, each followed by what is compressed in it."""
    found: dict[str, bytes] = {}
    for path in (path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        data = path.read_bytes()
        if path.suffix == ".fold":
            data += json.dumps(unpack_fold(data)[1], ensure_ascii=False).encode()
        if path.suffix in (".db", ".sqlite"):
            data += b"\n".join(values(path))
        for start in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):  # zlib, such as a grammar
            with contextlib.suppress(zlib.error):
                data += zlib.decompress(data[start.start() :])
        found[str(path.relative_to(root))] = data
    return found


def where(root: Path, words: Sequence[str]) -> list[tuple[str, str]]:
    """Which of these words are in which files."""
    return [(name, word) for name, data in contents(root).items() for word in words if word.encode() in data]
