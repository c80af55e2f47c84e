"""Builds tasks from one package: runs its suite, mutates its functions, and makes tasks of the stable mutations.

A package's attempts are recorded on disk as they are made, so that a killed build resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from blake3 import blake3

from ostinato.core.clock import wall_clock
from ostinato.core.conversation import Message, Role
from ostinato.core.files import install_directory, write_atomic
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.building.attempts import Attempt, Attempts
from ostinato.worlds.building.config import BuildConfig
from ostinato.worlds.building.filters import ChangeFate, NoticedTests, TaskKind, gives_away, instruct
from ostinato.worlds.building.mutations import Function
from ostinato.worlds.building.runs import BuildPlace, GreenSuite, SuiteRuns, run_baseline
from ostinato.worlds.building.sources import FetchedArchive, fetch_wheels, read_tree, unpack, without_top
from ostinato.worlds.tasks.places import check_tree
from ostinato.worlds.tasks.task import Grading, Split, Task

# ---------------------------------------------------------------- the journal


def _attempt_row(attempt: Attempt) -> dict[str, Any]:
    row: dict[str, Any] = {
        "function": attempt.function, "kind": attempt.kind.value, "detail": attempt.detail, "fate": attempt.fate.value,
    }  # fmt: skip
    if attempt.fate is ChangeFate.VALID:
        row |= {"block": attempt.block, "fail": attempt.noticed.fail_to_pass, "pass": attempt.noticed.pass_to_pass}
    return row


def _attempt_of(row: Mapping[str, Any]) -> Attempt:
    return Attempt(
        function=row["function"],
        kind=TaskKind(row["kind"]),
        detail=row["detail"],
        block=row.get("block", ""),
        fate=ChangeFate(row["fate"]),
        noticed=NoticedTests(fail_to_pass=tuple(row.get("fail", ())), pass_to_pass=tuple(row.get("pass", ()))),
    )


@dataclass(slots=True)
class JournalContent:
    """The journal's content: the functions that are done, every attempt, and the CPU seconds spent on all of it.

    Example: ``JournalContent(done={"calc.py::add"}, attempts=[attempt], cpu=1.5)``
    """

    done: set[str] = field(default_factory=set[str])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    cpu: float = 0.0


class BuildJournal:
    """One package's journal: `suite.json` and `tried.jsonl` in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def suite(self) -> GreenSuite | None:
        """The recorded suite, or None if none is recorded."""
        try:
            row = json.loads((self.directory / "suite.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        functions = [(path, line) for path, line in row.pop("functions")]
        ran = {test: frozenset(functions[number] for number in ran) for test, ran in row["ran"].items()}
        row |= {"stable": tuple(row["stable"]), "ran": ran}
        return GreenSuite(**row)

    def keep_suite(self, suite: GreenSuite) -> None:
        """Record the suite; the file is written atomically."""
        numbers: dict[tuple[str, int], int] = {}
        ran = {
            test: [numbers.setdefault(each, len(numbers)) for each in sorted(ran)] for test, ran in suite.ran.items()
        }
        row = {each.name: getattr(suite, each.name) for each in fields(suite)} | {
            "ran": ran,
            "functions": list(numbers),
        }
        write_atomic(self.directory / "suite.json", json.dumps(row), durable=True, mode=0o666)

    def tried(self) -> JournalContent:
        """Everything tried so far. A truncated last line is ignored, so its functions are tried again."""
        found = JournalContent()
        try:
            lines = (self.directory / "tried.jsonl").read_text().split("\n")
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                row = json.loads(line)
                attempts = [_attempt_of(each) for each in row["attempts"]]
            except (ValueError, KeyError):
                continue
            found.done |= set(row["functions"])
            found.attempts += attempts
            found.cpu += row["cpu"]
        return found

    def add(self, functions: Sequence[str], attempts: Sequence[Attempt], cpu: float) -> None:
        """Append one batch: the functions that are now done, the attempts, and the CPU seconds they took."""
        row = {
            "functions": list(functions),
            "attempts": [_attempt_row(each) for each in attempts],
            "cpu": round(cpu, 3),
        }
        with (self.directory / "tried.jsonl").open("a") as file:
            file.write("\n" + json.dumps(row) + "\n")  # the line before it may have been cut off
            file.flush()
            os.fsync(file.fileno())


# ---------------------------------------------------------------- layers


_HALF = ".half-"
_LEFT_S = 3600.0  # no layer takes so long to be written
SITE = f".venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def layer_hash(files: Mapping[str, bytes]) -> str:
    """BLAKE3 of the paths and bytes."""
    digest = blake3()
    for path, data in sorted(files.items()):
        name = os.fsencode(path)
        digest.update(b"%d %d %b" % (len(name), len(data), name) + data)
    return digest.hexdigest()


def write_layer(directory: Path, label: str, files: Mapping[str, bytes], *, compiled: bool) -> Path:
    """Write a layer with these files below `directory` and return its path; an existing layer is reused.

    `compiled` puts bytecode beside the sources (compiled, not run), which Python loads without checking the source again. Raises BadConfig
    for paths that are not those of one directory.
    """
    check_tree(files)
    place = directory / f"{label}-{layer_hash(files)[:16]}"
    if place.is_dir():
        return place
    directory.mkdir(parents=True, exist_ok=True)
    _remove_left(directory)
    half = Path(tempfile.mkdtemp(prefix=_HALF, dir=directory))
    try:
        for path, data in files.items():
            target = half / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if compiled and path.endswith(".py"):
                unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
                py_compile.compile(str(target), dfile=path, invalidation_mode=unchecked, quiet=2)
        for folder, _, names in os.walk(half):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o644)
        try:
            install_directory(half, place)  # one that is there is taken for whole
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(half)  # another build has written it meanwhile
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return place


def _remove_left(directory: Path) -> None:
    """Remove half-written layers of killed builds, but none that another build is writing."""
    for left in directory.glob(f"{_HALF}*"):
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < wall_clock() - _LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


# ---------------------------------------------------------------- the build


BUILD_LIMITS = Limits(memory_mb=4096, disk_mb=512, processes=64, output_bytes=64 << 20)
_RULES = 3  # raise this when the same settings would judge a change differently: earlier attempts are then tried again
TASK_WORKDIR = "/work"
TASK_LIMITS = Limits(memory_mb=1024, disk_mb=128, processes=64, output_bytes=1 << 18)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageYield:
    """The result of building a package. `fates` counts the attempts by fate, `kinds` the tasks by kind.

    Example: ``PackageYield(package="tabulate", version="0.10.0", tasks=(task,), suite=suite, fates={}, kinds={"bug": 1}, cpu=9.0)``
    """

    package: str
    version: str
    tasks: tuple[Task, ...]
    suite: GreenSuite
    fates: Mapping[str, int]
    kinds: Mapping[str, int]
    cpu: float


class PackageBuild:
    """Builds one package from its archive. All its tasks are in one split: a model trained on some would know the others' code."""

    def __init__(
        self, place: BuildPlace, config: BuildConfig, archive: FetchedArchive, project: str, split: Split = Split.TRAIN
    ) -> None:
        self.place = place
        self.config = config
        self.split = split
        self.digest = hashlib.sha256(archive.data).hexdigest()
        self.tree = read_tree(without_top(unpack(archive.data, archive.name)), project)
        self.label = f"{self.tree.name}-{self.tree.version}"
        self.sources = self.tree.sources()

    async def _layers(self) -> tuple[Path, Path]:
        """Write a layer with the tests' requirements, and a layer with the tree and the metadata that marks the package as installed."""
        tree = self.tree
        wheels = await fetch_wheels(["pytest", *tree.requires, *tree.test_requires])
        own = {*tree.modules, *(f"{module}.py" for module in tree.modules)}
        needed = {f"{SITE}/{path}": data for path, data in wheels.items() if path.split("/")[0] not in own}
        metadata = f"{SITE}/{tree.name.replace('-', '_')}-{tree.version}.dist-info/METADATA"
        needs = write_layer(self.place.layers, "needs", needed, compiled=True)
        files = {**tree.files, metadata: tree.metadata}
        return needs, write_layer(self.place.layers, self.label, files, compiled=False)

    def _env(self, workdir: str) -> dict[str, str]:
        path = f"{workdir}/{self.tree.root}".rstrip("/")
        return {"PYTHONPATH": f"{path}:{workdir}/{SITE}", "PYTHONDONTWRITEBYTECODE": "1"}

    def _spec(self, layers: Sequence[Path]) -> SandboxSpec:
        return SandboxSpec(
            layers=tuple(str(layer) for layer in layers),
            workdir=self.place.workdir,
            env=self._env(self.place.workdir),
            limits=BUILD_LIMITS,
        )

    def _journal(self) -> BuildJournal:
        identity = f"{_RULES} {self.digest} {self.config.model_dump_json(exclude={'tasks', 'cpu_seconds'})}"
        short = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return BuildJournal(self.place.cache / f"{self.label}-{short}")

    async def run(self, progress: Callable[[str, int, float], None]) -> PackageYield:
        """Build until there are enough tasks, the time is up, or no function is left.

        `progress` receives the current step, the number of tasks so far, and the share of the allowed CPU time that is used.

        Raises BadRequest, with the reason, if no tasks can be made of the package.
        """
        progress("fetching what its tests need", 0, 0.0)
        spec = self._spec(await self._layers())
        journal = self._journal()
        runs = SuiteRuns(self.place.backend, spec, self.place.python, ("pytest", "hypothesis"))
        tried, suite = journal.tried(), journal.suite()
        if suite is None:
            progress("running its suite", 0, 0.0)
            started = time.process_time()
            suite = await run_baseline(runs, self.tree.tests)
            journal.keep_suite(suite)
            journal.add([], [], runs.cpu + time.process_time() - started)
            tried = journal.tried()
        attempts = Attempts(runs, suite, self.sources, self.tree.files, self.config)
        for functions in attempts.batches(frozenset(tried.done)):
            found = sum(each.fate is ChangeFate.VALID for each in tried.attempts)
            progress("changing it", found, min(1.0, tried.cpu / self.config.cpu_seconds))
            if found >= self.config.tasks or tried.cpu >= self.config.cpu_seconds:
                break
            before, started = runs.cpu, time.process_time()
            fresh = await attempts.try_batch(functions)
            spent = runs.cpu - before + time.process_time() - started
            journal.add([function.key for function in functions], fresh, spent)
            tried.attempts += fresh
            tried.cpu += spent
        return self._result(spec, suite, tried, {function.key: function for function in attempts.functions()})

    def _result(
        self, spec: SandboxSpec, suite: GreenSuite, tried: JournalContent, functions: Mapping[str, Function]
    ) -> PackageYield:
        tasks: list[Task] = []
        kinds: Counter[str] = Counter()
        fates = Counter(each.fate.value for each in tried.attempts)
        for attempt in tried.attempts:
            if attempt.fate is ChangeFate.VALID and len(tasks) < self.config.tasks:
                task = self._task(spec, attempt, functions[attempt.function])
                if task is None:
                    fates[ChangeFate.VALID.value] -= 1
                    fates["its words give the answer away"] += 1
                    continue
                tasks.append(task)
                kinds[attempt.kind.value] += 1
        return PackageYield(
            package=self.tree.name,
            version=self.tree.version,
            tasks=tuple(tasks),
            suite=suite,
            fates=fates,
            kinds=kinds,
            cpu=tried.cpu,
        )

    def _task(self, spec: SandboxSpec, attempt: Attempt, function: Function) -> Task | None:
        """The attempt as a task; None if its instruction would contain a line of the answer."""
        tree, text = self.tree, self.sources[function.path]
        words = instruct(attempt.kind, function, tree.name, attempt.noticed.fail_to_pass)
        if gives_away(function, text, words):
            return None
        number = hashlib.sha256(
            f"{self.digest} {attempt.function} {attempt.kind} {attempt.block}".encode()
        ).hexdigest()[:8]
        return Task(
            id=f"{self.label}-{attempt.kind}-{number}",
            family=f"package.{attempt.kind}",
            messages=(Message(role=Role.USER, text=words),),
            spec=SandboxSpec(
                layers=spec.layers,
                workdir=TASK_WORKDIR,
                env=self._env(TASK_WORKDIR),
                files={function.path: function.replaced(text, attempt.block).encode()},
                limits=TASK_LIMITS,
            ),
            grading=Grading(
                grader="pytest",
                data={
                    "fail_to_pass": list(attempt.noticed.fail_to_pass),
                    "pass_to_pass": list(attempt.noticed.pass_to_pass),
                    "solution": {function.path: text},
                    "sources": sorted(self.sources),
                    "path": [tree.root.rstrip("/") or ".", SITE],
                },
                timeout_s=120.0,
            ),
            harness="tools",
            split=self.split,
            turns=24,
            tokens=2048,
            about={
                "package": tree.name,
                "version": tree.version,
                "sha256": self.digest,
                "function": function.key,
                "change": attempt.detail or attempt.kind.value,
            },
        )
