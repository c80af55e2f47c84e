"""Supervised training: builds corpora, continues pre-training on them, and imitates conversations (SFT); writes a plain model directory.

Continued pre-training has a learning-rate schedule and checkpoints from which it resumes. A corpus is built from packages, directories and
tests, with the configured model's tokenizer.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from blake3 import blake3

import ostinato
from ostinato.app.numerics import trainer_backend, trainer_contract, training
from ostinato.app.storage import model_path
from ostinato.config import Config
from ostinato.core.conversation import Conversation
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.files import install_directory
from ostinato.core.lines import lines_of
from ostinato.core.numerics import Contract
from ostinato.core.records import Turn
from ostinato.core.weights import Learned
from ostinato.corpus.build import CorpusBuild, check_new
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.filters import OverlapIndex, strings
from ostinato.corpus.order import Phase
from ostinato.corpus.shards import CorpusManifest, CorpusReader, ShardSet
from ostinato.corpus.sources import SourceFiles, archive_source, directory_source, stdlib_source
from ostinato.serve.dialects.dialect import Omissions
from ostinato.serve.dialects.openai import read_messages, read_tools
from ostinato.weights.follow.export import files_beside, write_model
from ostinato.worlds.building.sources import fetch_sdist, unpack, without_top

if TYPE_CHECKING:
    from ostinato.model.renderer import HFRenderer
    from ostinato.train.trainer import PolicyTrainer

# ---------------------------------------------------------------- corpora


_MAX_TEST_BYTES = 256 << 20


async def open_source(name: str) -> SourceFiles:
    """Open the source that a command-line word names: `stdlib`, a directory (with a slash), a source distribution's path, or a package.

    Raises BadRequest, TooLarge, Corrupt and Unavailable for faults of the archive or its index.
    """
    if name == "stdlib":
        return stdlib_source()
    if "/" in name and Path(name).is_dir():
        return directory_source(Path(name))
    archive = await fetch_sdist(name)
    return archive_source(without_top(unpack(archive.data, archive.name)), archive.name, archive.sha256)


def read_tests(files: Sequence[Path], config: CorpusConfig) -> tuple[OverlapIndex, dict[str, str]]:
    """Return an index of the texts with which no corpus file may overlap, and each file's hash. Raises BadConfig for an unusable file."""
    tested, hashes = OverlapIndex(config.gram, config.shortest), dict[str, str]()
    for file in files:
        try:
            if file.stat().st_size > _MAX_TEST_BYTES:
                raise BadConfig(f"--against {file}: larger than {_MAX_TEST_BYTES >> 20} MiB; cut it into several")
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
    """Return the BLAKE3 hash of a model directory's tokenizer. Raises BadConfig if it has no tokenizer.json."""
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


# ---------------------------------------------------------------- the model directory


def _write_trained(trainer: PolicyTrainer, source: Path, target: Path) -> None:
    """Write the trained weights to a directory, with the other files of the model that training started from."""
    write_model(trainer.weights(), target, files_beside(source), {"format": "pt"})


# ---------------------------------------------------------------- learning-rate schedule


def learning_rate_at(step: int, *, steps: int, peak: float, warmup: int, floor: float) -> float:
    """Return the learning rate: linear from 0 to `peak` over `warmup` steps, then half a cosine to `floor` times the peak at the last step.

    `step` counts from 0. Source: Loshchilov and Hutter 2017 (1608.03983), without restarts.
    Example: ``learning_rate_at(0, steps=100, peak=1e-4, warmup=10, floor=0.1)`` is 1e-5, and that of step 99 is 1e-5 again.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


# ---------------------------------------------------------------- continued pre-training


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The corpora and the schedule of a continued pre-training. `tokens` and `batch_tokens` count predicted tokens; `warmup` is a share of
    the steps, `floor` a share of the peak.

    Warm-up takes at least `train.warmup_steps`, or half of the steps if that is fewer, because AdamW's first moments come from one batch.

    Example: ``Course(corpora=(Path("corpus"),), weights=(1.0,), tokens=1 << 20, phases=(Phase(length=512),))``
    """

    corpora: tuple[Path, ...]
    weights: tuple[float, ...]
    tokens: int
    phases: tuple[Phase, ...] = (Phase(length=512, share=3), Phase(length=1024, share=1))
    batch_tokens: int = 8192
    learning_rate: float = 1e-4
    warmup: float = 0.05
    floor: float = 0.1
    held_out: float = 0.02
    measured_tokens: int = 16384
    measure_every: int = 25
    keep_every: int = 25

    @property
    def steps(self) -> int:
        """The number of optimizer steps; the last is a full batch, too."""
        return max(1, round(self.tokens / self.batch_tokens))

    def learning_rate_of(self, step: int, warmup_steps: int) -> float:
        """Return the learning rate of a step. `warmup_steps` is the configured minimum of warm-up steps."""
        warmup = max(round(self.warmup * self.steps), min(warmup_steps, self.steps // 2))
        return learning_rate_at(step, steps=self.steps, peak=self.learning_rate, warmup=warmup, floor=self.floor)

    def check(self, context: int) -> None:
        """Raise BadConfig, which names the option, if a model with this context length cannot be trained with these settings."""
        for phase in self.phases:
            if phase.length < 1 or not 0 < phase.share < math.inf or self.batch_tokens % phase.length:
                raise BadConfig(
                    f"--length {phase.length}: --batch-tokens {self.batch_tokens} must be a multiple of it, its share positive"
                )
            if phase.length > context:
                raise BadConfig(
                    f"--length {phase.length}: the model's context has {context} tokens; give lengths up to that, as in --length {context}"
                )
        if len(self.weights) != len(self.corpora) or not all(0 < weight < math.inf for weight in self.weights):
            raise BadConfig("--mixture: give as many positive weights as there are --corpus, or none")
        if not 0 < self.held_out < 1:
            raise BadConfig("--held-out: a share between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingStep:
    """Progress after `step` of `steps`: the step's metrics, and the held-out loss in nats per token if it was measured.

    `epochs`: how often the most-read corpus has been read.
    Example: ``ReadingStep(step=25, steps=100, metrics={"loss": 1.9}, held_out=1.95, epochs=0.4)``; step 0 has no metrics.
    """

    step: int
    steps: int
    metrics: Mapping[str, float]
    held_out: float | None
    epochs: float


def read_into(
    config: Config, course: Course, target: Path, on_step: Callable[[ReadingStep], None]
) -> list[tuple[int, float]]:
    """Train the configured model on the corpora and write the result as a plain model directory. Imports torch.

    Until then checkpoints are kept in `TARGET.checkpoints`. Called again after a kill, it resumes from the newest one and ends with the
    same bytes. Return the held-out losses as (step, nats per token).

    Raises BadConfig (a target that is not empty, corpora of another tokenizer, a checkpoint of another course), NotFound, Corrupt and
    StorageFull.
    """
    from ostinato.model.cpu import team
    from ostinato.model.renderer import HFRenderer
    from ostinato.train import checkpoint
    from ostinato.train.trainer import PolicyTrainer

    check_new(target)
    source = model_path(config)
    course.check(HFRenderer(source).context)
    sets = [ShardSet(path) for path in course.corpora]
    _check_tokenizer(sets, source)
    reader = CorpusReader(
        sets, course.weights, course.phases, batch_tokens=course.batch_tokens, steps=course.steps, share=course.held_out,
        seed=config.train.seed,
    )  # fmt: skip
    contract = trainer_contract(config)
    trainer = PolicyTrainer(source, training(config), contract, backend=trainer_backend(config))
    kept = target.with_name(f"{target.name}.checkpoints")
    identity = _identity(config, course, sets, source, contract)
    losses: list[tuple[int, float]] = []
    found = checkpoint.load(kept)
    if found is not None:
        if found.extra.get("course") != identity:
            raise BadConfig(
                f"{kept} holds another course's checkpoint: give its options again, or remove the directory to start over"
            )
        trainer.restore(found)
        losses = [(int(step), float(loss)) for step, loss in found.extra["losses"]]
    with team(config.train.threads):
        _run(trainer, reader, course, losses, kept, identity, on_step)
    _write(trainer, source, target)
    shutil.rmtree(kept, ignore_errors=True)
    return losses


def _write(trainer: PolicyTrainer, source: Path, target: Path) -> None:
    """Write the model directory atomically, because a half-written one would block the command that resumes."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _write_trained(trainer, source, partial)
    install_directory(partial, target)


def _run(
    trainer: PolicyTrainer,
    reader: CorpusReader,
    course: Course,
    losses: list[tuple[int, float]],
    kept: Path,
    identity: str,
    on_step: Callable[[ReadingStep], None],
) -> None:
    from ostinato.train import checkpoint

    steps, measured = course.steps, reader.held_out(course.measured_tokens)

    def measure(step: int) -> float:
        losses.append((step, trainer.surprise(measured)))
        return losses[-1][1]

    if not losses:
        on_step(ReadingStep(step=0, steps=steps, metrics={}, held_out=measure(0), epochs=0.0))
    while trainer.step_count < steps:
        step = trainer.step_count
        rate = course.learning_rate_of(step, trainer.config.warmup_steps)
        metrics = trainer.read(reader.batch(step), learning_rate=rate)
        last = step + 1 == steps
        found = measure(step + 1) if last or (step + 1) % course.measure_every == 0 else None
        if (step + 1) % course.keep_every == 0 and not last:
            state = replace(trainer.state(), extra={"course": identity, "losses": [list(each) for each in losses]})
            checkpoint.save(kept, state)
        epochs = reader.epochs((step + 1) * course.batch_tokens)
        on_step(ReadingStep(step=step + 1, steps=steps, metrics=metrics, held_out=found, epochs=epochs))


def _check_tokenizer(sets: Sequence[ShardSet], source: Path) -> None:
    own = tokenizer_hash(source)
    for each in sets:
        if each.manifest.tokenizer != own:
            raise BadConfig(
                f"{each.directory} was made with another tokenizer than the model's: build it with --set model.source='{source}'"
            )


def _identity(config: Config, course: Course, sets: Sequence[ShardSet], source: Path, contract: Contract) -> str:
    """Return a hash of everything that the final weights and the measured losses depend on. A checkpoint resumes only with the same hash.

    The checkpoint interval is not part of it, so that it may be changed when space or time is short.
    """
    of_sets = [each.manifest.model_dump_json() for each in sets]
    options: dict[str, Any] = {**asdict(course), "corpora": None, "keep_every": None}
    files = [*sorted(source.glob("*.safetensors")), source / "config.json"]
    model = [blake3().update_mmap(path).hexdigest() for path in files]
    arithmetic = (ostinato.__version__, contract.id, training(config).model_dump_json())
    told = repr((of_sets, sorted(options.items()), arithmetic, model))
    return blake3(told.encode()).hexdigest()


# ---------------------------------------------------------------- imitation (SFT)


MOST_BYTES = 1 << 30
_FIELDS = {"messages", "tools"}


def read_demonstrations(path: Path) -> list[Conversation]:
    """Read conversations from a file, one per line: {"messages": [...], "tools": [...]} as in OpenAI's chat API.

    Raises BadConfig, which names the line, the field and the remedy.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadConfig(f"demonstrations {path}: larger than {MOST_BYTES} bytes; cut it into several")
        lines = lines_of(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(
            f"demonstrations {path} cannot be read: {error}; name a text file in UTF-8, one conversation per line"
        ) from error
    found = [_read(f"demonstrations {path}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadConfig(f"demonstrations {path}: the file is empty; give one conversation per line")
    return found


def _read(where: str, line: str) -> Conversation:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{where} is not JSON: {error}; write one object on each line") from error
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise BadConfig(f'{where}: give an object with "messages", a list')
    given = cast("dict[str, Any]", row)
    if unknown := given.keys() - _FIELDS:
        raise BadConfig(f"{where}: there is no field {sorted(unknown)[0]!r}; there are messages and tools")
    if not all(isinstance(each, dict) for each in [*given["messages"], *(given.get("tools") or [])]):
        raise BadConfig(f'{where}: messages and tools are lists of objects, as in {{"role": "user", "content": "Hi"}}')
    omissions = Omissions()
    try:
        messages = read_messages(given["messages"], omissions)
        tools = read_tools(given.get("tools") or [])
    except BadRequest as error:
        raise BadConfig(f"{where}: {error}") from error
    if omissions.words:
        raise BadConfig(
            f"{where}: holds {omissions.words[0]}; the model reads text only, so leave such conversations out"
        )
    return Conversation(messages=messages, tools=tools)


def imitate_into(
    config: Config,
    shown: list[Conversation],
    target: Path,
    *,
    epochs: int,
    batch: int,
    on_step: Callable[[Learned], None],
) -> None:
    """Train the configured model on the conversations and write the result as a plain model directory. Imports torch.

    Raises BadConfig for a conversation that the model's template cannot render, for a target that is not empty, and as the training
    worker does; StorageFull.
    """
    from ostinato.model.renderer import HFRenderer
    from ostinato.train.imitation import imitate
    from ostinato.train.trainer import PolicyTrainer

    check_new(target)
    source = model_path(config)
    renderer = HFRenderer(source)
    lessons = [_rendered(number, each, renderer) for number, each in enumerate(shown, 1)]
    trainer = PolicyTrainer(source, training(config), trainer_contract(config), backend=trainer_backend(config))
    for learned in imitate(trainer, lessons, epochs=epochs, batch=batch, seed=config.train.seed):
        on_step(learned)
    _write_trained(trainer, source, target)


def _rendered(number: int, shown: Conversation, renderer: HFRenderer) -> tuple[Turn, ...]:
    from ostinato.train.imitation import shown_turns

    try:
        turns = shown_turns(shown, renderer)
    except BadRequest as error:
        raise BadConfig(f"demonstration {number}: {error}") from error
    longest = max(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns)
    if longest > renderer.context:
        raise BadConfig(
            f"demonstration {number} has {longest} tokens, and the model's context {renderer.context}: shorten it, or leave it out"
        )
    return turns
