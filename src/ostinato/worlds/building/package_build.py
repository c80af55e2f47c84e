"""Builds tasks from one package: runs its test suite, mutates its functions, and turns mutations with reproducible failures into tasks.

Attempts are journaled on disk, so that a killed build resumes where it stopped.
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
from ostinato.worlds.building.filters import ChangeFate, NoticedTests, TaskKind, instruct, reveals_answer
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
    """The journal's content: the functions that are done, every attempt, and the CPU seconds spent so far.

    Example: ``JournalContent(done={"calc.py::add"}, attempts=[attempt], cpu=1.5)``
    """

    done: set[str] = field(default_factory=set[str])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    cpu: float = 0.0


class BuildJournal:
    """One package's journal: the files `suite.json` and `tried.jsonl` in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def suite(self) -> GreenSuite | None:
        """Return the recorded suite, or None if there is none."""
        try:
            row = json.loads((self.directory / "suite.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        functions = [(path, line) for path, line in row.pop("functions")]
        ran = {test: frozenset(functions[number] for number in ran) for test, ran in row["ran"].items()}
        row |= {"stable": tuple(row["stable"]), "ran": ran}
        return GreenSuite(**row)

    def keep_suite(self, suite: GreenSuite) -> None:
        """Record the suite, atomically."""
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
        """Return everything tried so far. A truncated last line is ignored, so its functions are tried again."""
        content = JournalContent()
        try:
            lines = (self.directory / "tried.jsonl").read_text().split("\n")
        except FileNotFoundError:
            return content
        for line in lines:
            try:
                row = json.loads(line)
                attempts = [_attempt_of(each) for each in row["attempts"]]
            except (ValueError, KeyError):
                continue
            content.done |= set(row["functions"])
            content.attempts += attempts
            content.cpu += row["cpu"]
        return content

    def add(self, functions: Sequence[str], attempts: Sequence[Attempt], cpu: float) -> None:
        """Append one batch durably: the functions that are now done, the attempts, and the CPU seconds they took."""
        row = {
            "functions": list(functions),
            "attempts": [_attempt_row(each) for each in attempts],
            "cpu": round(cpu, 3),
        }
        with (self.directory / "tried.jsonl").open("a") as file:
            file.write("\n" + json.dumps(row) + "\n")  # the previous line may be truncated
            file.flush()
            os.fsync(file.fileno())


# ---------------------------------------------------------------- layers


_PARTIAL = ".half-"
_STALE_S = 3600.0  # writing a layer takes less than this
SITE = f".venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def layer_hash(files: Mapping[str, bytes]) -> str:
    """Return the BLAKE3 hash of the files' paths and contents."""
    digest = blake3()
    for path, data in sorted(files.items()):
        name = os.fsencode(path)
        digest.update(b"%d %d %b" % (len(name), len(data), name) + data)
    return digest.hexdigest()


def write_layer(directory: Path, label: str, files: Mapping[str, bytes], *, compiled: bool) -> Path:
    """Write a layer with these files below `directory`, atomically, and return its path. An identical layer is reused.

    `compiled` adds bytecode beside the sources (compiled, not run), which Python loads without checking the source. Raises BadConfig for
    paths that cannot all be in one directory.
    """
    check_tree(files)
    place = directory / f"{label}-{layer_hash(files)[:16]}"
    if place.is_dir():
        return place
    directory.mkdir(parents=True, exist_ok=True)
    _sweep_partial(directory)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=directory))
    try:
        for path, data in files.items():
            target = partial / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if compiled and path.endswith(".py"):
                unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
                py_compile.compile(str(target), dfile=path, invalidation_mode=unchecked, quiet=2)
        for folder, _, names in os.walk(partial):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o644)
        try:
            install_directory(partial, place)  # an existing layer counts as complete
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(partial)  # another build has written the same layer
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return place


def _sweep_partial(directory: Path) -> None:
    """Remove partial layers of killed builds, but none that another build is writing."""
    for left in directory.glob(f"{_PARTIAL}*"):
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < wall_clock() - _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


# ---------------------------------------------------------------- the build


BUILD_LIMITS = Limits(memory_mb=4096, disk_mb=512, processes=64, output_bytes=64 << 20)
_RULES = 3  # raise when the same settings would judge a mutation differently: this invalidates earlier journals
TASK_WORKDIR = "/work"
TASK_LIMITS = Limits(memory_mb=1024, disk_mb=128, processes=64, output_bytes=1 << 18)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageYield:
    """The result of building a package. `fates`: number of attempts by fate. `kinds`: number of tasks by kind. `cpu`: CPU seconds.

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
    """Builds tasks from one package's archive. All are in one split, since a model trained on some has seen the others' code."""

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
        """Write two layers: the tests' requirements; and the sources, with metadata that marks the package as installed."""
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
        """Build until there are enough tasks, the CPU time is used up, or no function is left.

        `progress` receives the current step, the number of tasks so far, and the used share of the CPU time. Raises BadRequest, with the
        reason, if no tasks can be built from the package.
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
        """Return the attempt as a task; None if its instruction would contain a line of the answer."""
        tree, text = self.tree, self.sources[function.path]
        words = instruct(attempt.kind, function, tree.name, attempt.noticed.fail_to_pass)
        if reveals_answer(function, text, words):
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
