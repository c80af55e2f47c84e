"""`ostinato corpus`: code corpora for continued pre-training, and the options of `ostinato train` that read them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import DEFAULTS, Common, Paths, Positive, Share, Words
from ostinato.core.errors import BadConfig

if TYPE_CHECKING:
    from ostinato.config import Config

corpus = App(
    name="corpus", help="Code corpora for continued pre-training: files under permissive licences, as token shards."
)


@corpus.command
def build(
    *sources: str,
    out: Path,
    against: Paths = (),
    near: Share = 0.7,
    gram: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 13,
    shard_tokens: Annotated[int, Parameter(validator=validators.Number(gte=1024))] = 1 << 22,
    common: Common = DEFAULTS,
) -> None:
    """Build token shards from Python packages, directories and the standard library, for the tokenizer of `model.source`.

    Left out, and counted in `corpus.json`: files without a permissive licence, exact and near duplicates, files that contain part of a
    test, generated files, data, and apparent secrets. No file is executed.

    For example: `ostinato corpus build stdlib tabulate attrs ./mine/ --out corpus --against held_out.jsonl`

    Parameters
    ----------
    sources
        `stdlib`, package names at pip's index, paths of source distributions, or directories (written with a slash).
    out
        A new directory for the corpus.
    against
        Suites, tasksets or texts that the model will be tested on: a file that shares `--gram` words in a row with them is left out.
    near
        Jaccard similarity of 5-word shingles from which a file counts as a copy. 1: exact copies only, which needs no `ostinato[corpus]`.
    gram
        Number of words in a row for `--against`.
    shard_tokens
        Approximate size of a shard, in tokens.
    """
    from ostinato.corpus.config import CorpusConfig
    from ostinato.launch.commands.supervised import build_corpus

    if not sources:
        raise BadConfig("name a source: stdlib, a package, a source distribution, or a directory")
    settings = CorpusConfig(near=near, gram=gram, shortest=min(8, gram), shard_tokens=shard_tokens)
    asyncio.run(build_corpus(common.starting(), sources, out, settings, against, Console()))


@corpus.command
def show(directory: Path) -> None:
    """Check a corpus, and show what it contains and what was left out.

    Parameters
    ----------
    directory
        The directory that `ostinato corpus build` wrote.
    """
    from ostinato.launch.commands.supervised import show_corpus

    show_corpus(directory, Console())


@Parameter(name="*", group="Reading a corpus")
@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How the command `train` reads corpora."""

    corpus: Paths = ()
    """A directory that `ostinato corpus build` made; repeat it for a mixture."""
    mixture: Annotated[tuple[float, ...], Parameter(negative="")] = ()
    """Each corpus's share of the tokens, in the same order. Default: in proportion to their sizes."""
    tokens: Positive = 1 << 20
    """Number of tokens to train on."""
    length: Words = ("512:3", "1024:1")
    """Tokens per window, as TOKENS or TOKENS:SHARE; repeat it for successive phases, each with its share of the steps."""
    batch_tokens: Positive = 8192
    """Tokens per optimizer step."""
    learning_rate: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 1e-4
    """Peak learning rate: warmed up over the first 20th of the steps, then decayed along half a cosine to a tenth."""
    held_out: float = 0.02
    """Share of the files, chosen by hash, that is used only to measure the loss."""
    measure_every: Positive = 25
    """Steps between two measurements on the held-out files."""
    keep_every: Positive = 25
    """Steps between two checkpoints; the same command resumes from the newest."""

    def read(self, config: Config, out: Path | None) -> None:
        """Train the configured model on the corpora, into the directory `out`. Raises BadConfig."""
        if out is None:
            raise BadConfig("--corpus needs --out, a new directory for the model")
        from ostinato.app.supervised import Course
        from ostinato.corpus.shards import read_manifest
        from ostinato.launch.commands.supervised import phases_of, read_corpora

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


NO_READING = ReadingOptions()
