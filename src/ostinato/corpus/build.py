"""Builds a corpus from sources: filters each file, tokenizes those that are kept, and counts the others by reason.

Data flow: source -> licence -> suffix, size, content filters -> test contamination -> deduplication -> tokens -> shards and `corpus.json`,
written atomically.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from ostinato.core.errors import BadConfig, BadRequest, StorageFull
from ostinato.core.files import install_directory
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.filters import CopyFinder, OverlapIndex, digest_of, text_of
from ostinato.corpus.shards import FORMAT, MANIFEST, CorpusManifest, Refusal, SourceShare, TokenDocument, write_shards
from ostinato.corpus.sources import Read, SourceFiles

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


class CorpusBuild:
    """Collects sources with `take`, then writes the corpus with `write`. The same sources in the same order give the same bytes.

    Memory: the tokens of all kept files, 4 bytes each, and about 3 kB per file for near-duplicate detection.

    Args:
        config: the filter settings.
        tested: an index of the tests that no file may overlap with.
        encode: text -> tokens; control tokens in the text must be encoded as plain text. Raises BadRequest for text that it cannot encode.
        separator: the token before and after each file.

    Raises BadConfig if `datasketch` is missing and `config.near` is below 1.
    """

    def __init__(
        self, config: CorpusConfig, tested: OverlapIndex, encode: Callable[[str], list[int]], separator: int
    ) -> None:
        self._config, self._tested, self._encode, self._separator = config, tested, encode, separator
        self._copies = CopyFinder(config.near)
        self._documents: list[TokenDocument] = []
        self._sources: list[SourceShare] = []
        self._refused: list[Refusal] = []
        self.left_out: Counter[str] = Counter()
        self.tokens = 0

    def refuse(self, name: str, reason: str, detail: str) -> None:
        """Record a source as refused."""
        self._record_refusal(Refusal(source=name, path="", reason=reason, detail=detail))

    def take(self, source: SourceFiles, on_file: Callable[[], None]) -> None:
        """Filter a source's files and tokenize those that are kept. `on_file` is called before each file.

        A source without a permissive licence is refused as a whole.
        """
        if not source.permissive:
            self.refuse(source.name, "licence", source.licence)
            return
        before, tokens = len(self._documents), self.tokens
        for path, read in source.files:
            on_file()
            if PurePosixPath(path).suffix in self._config.suffixes:
                self._filter(source, path.encode("utf-8", "replace").decode(), read)
        self._sources.append(
            SourceShare(
                name=source.name,
                licence=source.licence,
                sha256=source.sha256,
                documents=len(self._documents) - before,
                tokens=self.tokens - tokens,
            )
        )

    def _filter(self, source: SourceFiles, path: str, read: Read) -> None:
        try:
            data = read(self._config.most_bytes + 1)
        except OSError:
            self.left_out["unreadable"] += 1
            return
        text, reason = text_of(data, self._config)
        if reason:
            self.left_out[reason] += 1
            return
        if shared := self._tested.within(text):
            detail = f"{shared[0]}: {shared[1]}"
            self._record_refusal(Refusal(source=source.name, path=path, reason="tested", detail=detail))
            return
        if self._copies.seen(text):
            self.left_out["copy"] += 1
            return
        try:
            ids = self._encode(text)
        except BadRequest:
            self.left_out["encoding"] += 1
            return
        tokens = np.array([self._separator, *ids, self._separator], np.int32)
        self._documents.append(TokenDocument(digest=digest_of(text), tokens=tokens))
        self.tokens += len(tokens)

    def _record_refusal(self, what: Refusal) -> None:
        self.left_out[what.reason] += 1
        self._refused.append(what)

    def write(self, out: Path, *, tokenizer: str, vocabulary: int, against: Mapping[str, str]) -> CorpusManifest:
        """Write the shards and the manifest to a new directory, atomically.

        `tokenizer`: the hash of the tokenizer's file. `against`: the tests, name -> hash. Raises BadRequest if no file is left, BadConfig
        if `out` is not empty, StorageFull if the disk is full.
        """
        check_new(out)
        if not self._documents:
            raise BadRequest(f"no file is left for a corpus; left out: {dict(self.left_out)}", field="source")
        try:
            with _partial(out) as partial:
                shards = write_shards(self._documents, partial, self._config.shard_tokens)
                manifest = CorpusManifest(
                    format=FORMAT,
                    tokenizer=tokenizer,
                    vocabulary=vocabulary,
                    separator=self._separator,
                    settings=self._config,
                    against=dict(against),
                    sources=tuple(self._sources),
                    left_out=dict(sorted(self.left_out.items())),
                    refused=tuple(self._refused),
                    documents=len(self._documents),
                    tokens=self.tokens,
                    shards=shards,
                )
                (partial / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
                partial.chmod(0o755)
                install_directory(partial, out)
        except OSError as error:
            if error.errno in _NOT_EMPTY:
                raise _not_empty(out) from error
            if error.errno not in _DISK_FULL:
                raise
            raise StorageFull(f"--out {out}: {error.strerror}; free some space and build again") from error
        return manifest


def check_new(out: Path) -> None:
    """Raise BadConfig unless the directory does not exist or is empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise _not_empty(out)


def _not_empty(out: Path) -> BadConfig:
    return BadConfig(f"--out {out} is not empty; give a new directory")


@contextlib.contextmanager
def _partial(out: Path) -> Generator[Path]:
    """Make a temporary directory beside `out`, locked while this build runs. Those of killed builds are removed first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial_name = re.compile(rf"\.{re.escape(out.name)}\.partial(-\w+)?")
    with contextlib.ExitStack() as cleanup:
        with _locked(out.parent, fcntl.LOCK_EX):  # no other build may sweep our directory before it is locked
            for left in [path for path in out.parent.iterdir() if partial_name.fullmatch(path.name)]:
                with _locked(left) as free:
                    if free:
                        shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
            cleanup.callback(shutil.rmtree, partial, ignore_errors=True)
            cleanup.enter_context(_locked(partial))
        yield partial


@contextlib.contextmanager
def _locked(directory: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Generator[bool]:
    """Hold an flock on a directory; the kernel releases it if the process dies. Yield False if it cannot be taken."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        locked = False
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, how)
            locked = True
        yield locked
    finally:
        os.close(descriptor)
