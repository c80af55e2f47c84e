"""`ostinato corpus`: code corpora for continued pre-training, and how the command `train` reads them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import Common
from ostinato.core.errors import BadConfig

if TYPE_CHECKING:
    from ostinato.config import Config

corpus = App(
    name="corpus", help="Code corpora for continued pre-training: files under permissive licences, as token shards."
)
_Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]


@corpus.command
def build(
    *sources: str,
    out: Path,
    against: Annotated[tuple[Path, ...], Parameter(negative="")] = (),
    near: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 0.7,
    gram: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 13,
    shard_tokens: Annotated[int, Parameter(validator=validators.Number(gte=1024))] = 1 << 22,
    common: Common | None = None,
) -> None:
    """Make token shards out of Python packages, directories and the standard library, for the tokenizer of `model.source`.

    Left out, and counted in `corpus.json`: what is not under a permissive licence, copies and near copies, what holds a part of a test,
    generated files, data, and what looks like a secret. No file is run.

    For example: `ostinato corpus build stdlib tabulate attrs ./mine/ --out corpus --against held_out.jsonl`

    Parameters
    ----------
    sources
        `stdlib`, names at the index that pip uses, paths of source distributions, or directories (with a slash).
    out
        A new directory.
    against
        Suites, tasksets or texts that the model will be tested on: a file that has `--gram` words in a row with them is left out.
    near
        Similarity (Jaccard, of runs of 5 words) from which a file is a copy; 1: only exact ones, which needs no `ostinato[corpus]`.
    gram
        How many words in a row; see `--against`.
    shard_tokens
        Tokens of a shard, about.
    """
    from ostinato.corpus.config import CorpusConfig
    from ostinato.launch.commands.corpora.building import build_corpus

    if not sources:
        raise BadConfig("name a source: stdlib, a package, a source distribution, or a directory")
    settings = CorpusConfig(near=near, gram=gram, shortest=min(8, gram), shard_tokens=shard_tokens)
    asyncio.run(build_corpus((common or Common()).load(), sources, out, settings, against, Console()))


@corpus.command
def show(directory: Path) -> None:
    """Check a corpus, and say what stands in it and what was left out.

    Parameters
    ----------
    directory
        Where `ostinato corpus build` wrote it.
    """
    from ostinato.launch.commands.corpora.building import show_corpus

    show_corpus(directory, Console())


@Parameter(name="*", group="Reading a corpus")
@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How the command `train` reads corpora."""

    corpus: Annotated[tuple[Path, ...], Parameter(negative="")] = ()
    """A directory that `ostinato corpus build` made; may be repeated, for a mixture."""
    mixture: Annotated[tuple[float, ...], Parameter(negative="")] = ()
    """Each corpus's share of the tokens, in the same order; none: in proportion to their sizes."""
    tokens: _Positive = 1 << 20
    """How many tokens are learned from."""
    length: Annotated[tuple[str, ...], Parameter(negative="")] = ("512:3", "1024:1")
    """Tokens of a window; repeated, phases one after the other with their shares of the steps."""
    batch_tokens: _Positive = 8192
    """Tokens of an optimizer step."""
    learning_rate: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 1e-4
    """The highest; it rises over the first 20th of the steps and falls to a tenth along half a cosine."""
    held_out: float = 0.02
    """Share of the files, by their hashes, that is only measured on."""
    measure_every: _Positive = 25
    """Steps between two measurements on them."""
    keep_every: _Positive = 25
    """Steps between two checkpoints; the same command goes on from the newest."""

    def read(self, config: Config, out: Path | None) -> None:
        """Train the configured model on the corpora, into the directory `out`. Raises BadConfig."""
        if out is None:
            raise BadConfig("--corpus needs --out, a new directory for the model")
        from ostinato.app.midtraining import Course
        from ostinato.corpus.manifest import read_manifest
        from ostinato.launch.commands.corpora.course import phases_of, read_corpora

        sizes = tuple(float(read_manifest(each).tokens) for each in self.corpus)
        course = Course(
            corpora=self.corpus,
            weights=self.mixture or sizes,
            tokens=self.tokens,
            phases=phases_of(self.length),
            batch_tokens=self.batch_tokens,
            learning_rate=self.learning_rate,
            held_out=self.held_out,
            measure_every=self.measure_every,
            keep_every=self.keep_every,
        )
        read_corpora(config, course, out, Console())
