"""Where a corpus comes from: packages, directories and tests, and the configured model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from ostinato.app.storage import model_path
from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.corpus.build import CorpusBuild
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.filters import OverlapIndex, strings
from ostinato.corpus.sources import SourceFiles, archive_source, directory_source, stdlib_source
from ostinato.worlds.building.sources import fetch_sdist, unpack, without_top

if TYPE_CHECKING:
    from ostinato.corpus.shards import CorpusManifest

_MOST_BYTES = 256 << 20


async def open_source(name: str) -> SourceFiles:
    """The source that a command-line word names: `stdlib`, a directory (with a slash), a source distribution's path, or a package.

    Raises BadRequest, TooLarge, Corrupt and Unavailable for faults of the archive or its index.
    """
    if name == "stdlib":
        return stdlib_source()
    if "/" in name and Path(name).is_dir():
        return directory_source(Path(name))
    archive = await fetch_sdist(name)
    return archive_source(without_top(unpack(archive.data, archive.name)), archive.name, archive.sha256)


def read_tests(files: Sequence[Path], config: CorpusConfig) -> tuple[OverlapIndex, dict[str, str]]:
    """An index of the texts that no corpus file may overlap with, and each given file's hash. Raises BadConfig for an unusable file."""
    tested, hashes = OverlapIndex(config.gram, config.shortest), dict[str, str]()
    for file in files:
        try:
            if file.stat().st_size > _MOST_BYTES:
                raise BadConfig(f"--against {file}: larger than {_MOST_BYTES >> 20} MiB; cut it into several")
            data = file.read_bytes()
            text = data.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfig(f"--against {file} cannot be read as text: {error}; name files in UTF-8") from error
        if not tested.add(file.name, strings(text)):
            raise BadConfig(
                f"--against {file}: it holds no string of at least {config.shortest} words, five of them different, so nothing of it could "
                "be found; leave it out"
            )
        hashes[str(file)] = blake3(data).hexdigest()
    return tested, hashes


def tokenizer_hash(path: Path) -> str:
    """BLAKE3 of a model directory's tokenizer. Raises BadConfig if it has no tokenizer.json."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise BadConfig(f"model.source: {path} has no tokenizer.json: a corpus needs a model with one")
    return blake3(file.read_bytes()).hexdigest()


class CorpusDesk:
    """A corpus build with the configured model's tokenizer, and the index of texts that it must not overlap with."""

    def __init__(self, config: Config, settings: CorpusConfig, against: Sequence[Path]) -> None:
        from tokenizers import Tokenizer

        from ostinato.model.renderer import HFRenderer

        self._path = model_path(config)
        self._hash = tokenizer_hash(self._path)
        renderer = HFRenderer(self._path)
        end = Tokenizer.from_file(str(self._path / "tokenizer.json")).token_to_id("<|endoftext|>")
        tested, self._against = read_tests(against, settings)
        self._vocabulary = renderer.vocab_size
        self.build = CorpusBuild(
            settings, tested, renderer.encode, min(renderer.stop_ids()) if end is None else int(end)
        )

    def write(self, out: Path) -> CorpusManifest:
        """Write the corpus into a new directory. Raises BadRequest if nothing is left, BadConfig if the directory is not empty."""
        return self.build.write(out, tokenizer=self._hash, vocabulary=self._vocabulary, against=self._against)
