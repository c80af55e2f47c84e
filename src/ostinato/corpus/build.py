"""Builds a corpus from sources: each file is judged, tokenized if it is kept, and counted either way.

Data flow: source -> licence -> suffix, size, content filters -> test overlap -> copies -> tokens -> shards and `corpus.json`, atomically.
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

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


class CorpusBuild:
    """Takes sources one after the other, then writes the corpus. The same sources in the same order give the same bytes.

    Memory: the tokens of all kept files, 4 bytes each, and about 3 kB a file to find near copies.

    Args:
        config: the limits of the build.
        tested: the tests that no file may contain a part of.
        encode: text -> tokens, control tokens as plain text. Raises BadRequest for text that cannot be encoded.
        separator: the token before and after each file.

    Raises BadConfig if `datasketch` is missing and near copies are looked for.
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
        """Count a source that could not be read."""
        self._list(Refusal(source=name, path="", reason=reason, detail=detail))

    def take(self, source: SourceFiles, on_file: Callable[[], None]) -> None:
        """Judge a source's files; `on_file` is called for each."""
        if not source.permissive:
            self.refuse(source.name, "licence", source.licence)
            return
        before, tokens = len(self._documents), self.tokens
        for path, read in source.files:
            on_file()
            if PurePosixPath(path).suffix in self._config.suffixes:
                self._judge(source, path.encode("utf-8", "replace").decode(), read)
        self._sources.append(
            SourceShare(
                name=source.name,
                licence=source.licence,
                sha256=source.sha256,
                documents=len(self._documents) - before,
                tokens=self.tokens - tokens,
            )
        )

    def _judge(self, source: SourceFiles, path: str, read: Read) -> None:
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
            self._list(Refusal(source=source.name, path=path, reason="tested", detail=detail))
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

    def _list(self, what: Refusal) -> None:
        self.left_out[what.reason] += 1
        self._refused.append(what)

    def write(self, out: Path, *, tokenizer: str, vocabulary: int, against: Mapping[str, str]) -> CorpusManifest:
        """Write shards and manifest to a new directory, atomically. `tokenizer`: the hash of its file.

        Raises BadRequest if no file is left, BadConfig for a directory that is not empty, StorageFull if the disk is full.
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
            if error.errno in _TAKEN:
                raise _not_empty(out) from error
            if error.errno not in _FULL:
                raise
            raise StorageFull(f"--out {out}: {error.strerror}; free some space and build again") from error
        return manifest


def check_new(out: Path) -> None:
    """Raise BadConfig unless the directory is missing or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise _not_empty(out)


def _not_empty(out: Path) -> BadConfig:
    return BadConfig(f"--out {out} is not empty; give a new directory")


@contextlib.contextmanager
def _partial(out: Path) -> Generator[Path]:
    """A directory beside `out` for this build alone, locked while it runs. Those of killed builds are removed first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    ours = re.compile(rf"\.{re.escape(out.name)}\.partial(-\w+)?")
    with contextlib.ExitStack() as held:
        with _locked(out.parent, fcntl.LOCK_EX):  # nobody takes a directory for left that is not locked yet
            for left in [path for path in out.parent.iterdir() if ours.fullmatch(path.name)]:
                with _locked(left) as free:
                    if free:
                        shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
            held.callback(shutil.rmtree, partial, ignore_errors=True)
            held.enter_context(_locked(partial))
        yield partial


@contextlib.contextmanager
def _locked(directory: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Generator[bool]:
    """Hold the lock on a directory, which ends with its process. False if another holds it, or it cannot be locked."""
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
