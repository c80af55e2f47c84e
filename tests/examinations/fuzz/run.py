"""A fuzzing campaign against all readers of weights: the codec's decoder, the manifest's parser, the follower.

    python -m tests.examinations.fuzz.run --minutes 10 [--seed 1] [--processes 1]
    python -m tests.examinations.fuzz.run --replay runs/fuzz-weights/1-0.case

Cases are real payloads, manifests and stores with bits flipped, parts cut, spliced or swapped, headers and frames that lie, and generated
streams (`cases.py`). Cases that end in a new way are mutated further. A case is run in a child process (`targets.py`): targets and payloads
are placed between guard pages, and for a quarter of the time compiled code checks its indices. Findings are: an undocumented exception;
weights or manifests other than promised; the death of the child; more than CPU_S seconds of CPU time or WALL_S seconds for one case; memory
growth beyond the size that the case declares times TIMES, plus ALLOWANCE. Each finding is saved and can be replayed. Prints a table and
writes results/fuzz_weights.json.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contender import machine
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

CPU_S, WALL_S = 5.0, 60.0
TIMES, ALLOWANCE = 20, 64 << 20
ADDRESSES = (
    2 << 30
)  # address space beyond that of the warm child, so that a wild allocation fails instead of affecting other processes
WARM = 300  # cases before memory is checked, until compiled code is loaded and buffers have their size
CASE_BYTES = 1 << 24
_HEAD = 16
FINDINGS = Path("runs/fuzz-weights")


@dataclass
class Report:
    """The results of a campaign. `outcomes` counts cases by how they ended; `findings` describe failures and name the case files."""

    seconds: float = 0.0
    cases: int = 0
    children: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    peak_growth: int = 0

    def add(self, line: dict[str, Any]) -> None:
        self.cases += line["cases"]
        self.peak_growth = max(self.peak_growth, line["growth"])
        self.outcomes.update(line["outcomes"])


# ---------------------------------------------------------------- the child


class Slate:
    """Shared memory with the current case, which the parent can read after the child's death, and the number of cases run."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _HEAD + CASE_BYTES)

    def write(self, case: bytes) -> None:
        self._map[_HEAD : _HEAD + len(case)] = case
        self._map[8:16] = len(case).to_bytes(8, "little")
        self._map[:8] = (self.count + 1).to_bytes(8, "little")

    @property
    def count(self) -> int:
        return int.from_bytes(self._map[:8], "little")

    def read(self) -> bytes:
        return self._map[_HEAD : _HEAD + int.from_bytes(self._map[8:16], "little")]


def memory(name: str) -> int:
    """This process's memory in bytes: VmRSS now, or VmHWM, the peak since `forget_peak`. getrusage would include the parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def limit_addresses() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESSES, now + ADDRESSES))


def child(slate: Slate, seed: int, source: str, target: str) -> None:
    """Run cases until killed. Prints a line of JSON about every half second, and one for each finding."""
    cases = importlib.import_module(source).Source(seed)
    run: Callable[[Any], str] = importlib.import_module(target).run
    outcomes: collections.Counter[str] = collections.Counter()
    seen: set[str] = set()
    done, most, said = 0, 0, time.monotonic()
    while True:
        case = cases.next()
        data = case.to_bytes()
        if len(data) > CASE_BYTES:
            continue
        slate.write(data)
        forget_peak()
        before = memory("VmRSS")
        outcome = attempt(run, case)
        done += 1
        outcomes[outcome[:200]] += 1
        if outcome not in seen and len(seen) < 4096:
            seen.add(outcome)
            cases.keep(case)
        if slate.count == WARM:
            limit_addresses()
        elif slate.count > WARM:
            growth = memory("VmHWM") - before
            most = max(most, growth)
            if growth > TIMES * case.about["declared"] + ALLOWANCE:
                outcome = f"FINDING memory: {growth} bytes for a case that declares {case.about['declared']}"
        if outcome.startswith("FINDING") or time.monotonic() - said > 0.5:
            found = outcome if outcome.startswith("FINDING") else ""
            print(json.dumps({"cases": done, "outcomes": outcomes, "growth": most, "finding": found}), flush=True)
            if found:  # the parent reads the slate before it answers
                sys.stdin.readline()
            outcomes.clear()
            done, most, said = 0, 0, time.monotonic()


def attempt(run: Callable[[Any], str], case: Any) -> str:
    try:
        return run(case)
    except BaseException as error:  # a panic in compiled code is not an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"FINDING {type(error).__name__}: {error}"[:500]


# ---------------------------------------------------------------- the parent


class Watched:
    """One child, killed when a case takes too long."""

    def __init__(self, report: Report, where: Path, seed: int, checked: bool, modules: tuple[str, str]) -> None:
        self._report, self._where, self._seed = report, where, seed
        self._files = tempfile.TemporaryDirectory(prefix="fuzz-")
        path = Path(self._files.name) / "slate"
        with path.open("wb") as file:
            file.truncate(_HEAD + CASE_BYTES)
        self._slate = Slate(path)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if checked:  # compiled separately, with a cache of its own
            environment |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(where / "checked")}
        self._log = (where / f"{seed}.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.examinations.fuzz.run",
                "--child",
                str(path),
                "--seed",
                str(seed),
                "--modules",
                *modules,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        report.children += 1
        self._at, self._wall, self._cpu = 0, time.monotonic(), 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        for text in self._process.stdout:
            line = json.loads(text)
            self._report.add(line)
            if line["finding"]:
                self._save(line["finding"])
                with contextlib.suppress(OSError):
                    self._process.stdin.write("\n")
                    self._process.stdin.flush()

    def _save(self, what: str) -> None:
        """Save the case of a finding, at most three of each kind."""
        kind = what[:60]
        if sum(finding["what"].startswith(kind) for finding in self._report.findings) < 3:
            path = self._where / f"{self._seed}-{len(self._report.findings)}.case"
            path.write_bytes(self._slate.read())
            self._report.findings.append({"what": what, "seed": self._seed, "case": str(path)})

    def ended(self) -> bool:
        """True if the child died or a case takes too long. The finding is then saved."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(5)
            if self._slate.count == 0:
                raise SystemExit(f"the child did not start: see {self._log.name}")
            self._save(f"FINDING died: exit status {code}")
            return True
        if self._slate.count != self._at:
            self._at, self._wall, self._cpu = self._slate.count, time.monotonic(), self._used()
        elif self._at and (self._used() - self._cpu > CPU_S or time.monotonic() - self._wall > WALL_S):
            self._save(f"FINDING slow: more than {CPU_S:g} s of CPU or {WALL_S:g} s of time")
            return True
        return False

    def _used(self) -> float:
        """The child's CPU seconds so far."""
        with contextlib.suppress(OSError):
            parts = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
        return self._cpu

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()
        self._files.cleanup()


def campaign(
    seconds: float,
    seed: int,
    where: Path,
    *,
    processes: int = 1,
    checked: float = 0.25,
    modules: tuple[str, str] = ("tests.examinations.fuzz.cases", "tests.examinations.fuzz.targets"),
    most: int = 100,
    least: int = 0,
    console: Console | None = None,
) -> Report:
    """Fuzz for `seconds`, a share `checked` of them with bounds-checked compiled code. A child that ends is replaced.

    Ends early at `most` findings, and continues for up to a minute until `least` cases are done.
    """
    report, began = Report(), time.monotonic()
    where.mkdir(parents=True, exist_ok=True)
    seeds = iter(range(seed * 1000, seed * 1000 + 1000))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console is None) as progress:
        task = progress.add_task("", total=seconds)
        for share, check in ((checked, True), (1 - checked, False)):
            until = time.monotonic() + seconds * share
            running = [Watched(report, where, next(seeds), check, modules) for _ in range(processes if share else 0)]
            try:
                while len(report.findings) < most:
                    now = time.monotonic()
                    if now > until and (report.cases >= least or now > until + 60):
                        break
                    time.sleep(0.05)
                    for at, each in enumerate(running):
                        if each.ended():
                            each.close()
                            running[at] = Watched(report, where, next(seeds), check, modules)
                    spent = time.monotonic() - began
                    told = f"{report.cases:,} cases, {report.cases / spent:,.0f}/s, {len(report.findings)} findings"
                    progress.update(task, completed=spent, description=told)
            finally:
                for each in running:
                    each.close()
    report.seconds = time.monotonic() - began
    return report


def replay(path: Path) -> None:
    targets = importlib.import_module("tests.examinations.fuzz.targets")
    case = targets.Case.from_bytes(path.read_bytes())
    print(f"{case.kind} {json.dumps(case.about)[:2000]}; {[len(blob) for blob in case.blobs]} bytes")
    forget_peak()
    before, began = memory("VmRSS"), time.process_time()
    print(attempt(targets.run, case))
    print(f"{time.process_time() - began:.2f} s of CPU time, {(memory('VmHWM') - before) / 1e6:.1f} MB more memory")


def table(report: Report) -> Table:
    """How the cases of each target ended; the JSON has every message."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    ways: collections.Counter[str] = collections.Counter()
    for outcome, count in report.outcomes.items():
        name, _, end = outcome.partition(": ")
        name = " ".join(name.split()[:2])
        counts[name, end.split(":")[0].split(",")[0]] += count
        ways[name] += 1
    shown = Table("target", "ended", "cases", "ways in all", box=None, pad_edge=False)
    for column in shown.columns[2:]:
        column.justify = "right"
    for (name, end), count in sorted(counts.items()):
        shown.add_row(name, end, f"{count:,}", f"{ways[name]:,}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="run one saved case here, without guards around the process")
    parser.add_argument("--findings", type=Path, default=FINDINGS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "fuzz_weights.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--modules", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(Slate(args.child), args.seed, *args.modules)
    if args.replay:
        replay(args.replay)
        return
    before, console = machine(), Console(width=160)
    report = campaign(60 * args.minutes, args.seed, args.findings, processes=args.processes, console=console)
    console.print(table(report))
    rate = report.cases / report.seconds
    console.print(
        f"\n{report.cases:,} cases in {report.seconds:.0f} s, {rate:,.0f} a second; {len(report.outcomes)} ways to end, "
        f"{report.children} children, most memory one case took {report.peak_growth / 1e6:.1f} MB; {len(report.findings)} findings"
    )
    for finding in report.findings:
        console.print(f"[bold red]{finding['what'][:140]}[/] {finding['case']}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    limits = {"cpu_s": CPU_S, "wall_s": WALL_S, "times": TIMES, "allowance": ALLOWANCE}
    written = {"machine": before, "seed": args.seed, "limits": limits, "cases_per_second": rate, **vars(report)}
    args.out.write_text(json.dumps(written, indent=1, sort_keys=False) + "\n")
    sys.exit(1 if report.findings else 0)


if __name__ == "__main__":
    main()
