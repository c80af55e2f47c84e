"""Every attack that goes over the network, all at once and for minutes, beside an honest tenant.

    python -m tests.examinations.siege.run [--minutes 10] [--quick] [--each SECONDS] [--directory DIR]

A real `ostinato up` on the tiny model, with keys and default quotas. An honest tenant asks, rates and looks at pages in three phases:
alone for a minute; with all attacks of `attacks.py` beside it, by a tenant with a key and by strangers, in processes of their own; and,
as a control, with as many busy loops in the place of the attackers. Attackers and busy loops run at nice 19 in sessions of the least
weight, so that they take little of the processors from the gateway: what is examined is what their requests make it do.

Passes if nothing of the honest tenant's fails, the 99th percentile of its calls under attack is at most twice that of the first phase, all
processes of `up` are the same from beginning to end, no attack is answered wrongly, and memory, disk and output files keep their
bounds. Writes results/siege.json. `--quick`: 15 s alone, half a minute of attacks. `--each`: instead
of all at once, one attack after the other, to see which of them costs the honest tenant what; prints a table and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.examinations.siege.attacks import ATTACKS
from tests.examinations.siege.crew import PROCESSES, Crew, not_right, target
from tests.examinations.siege.honest import Felt, honest
from tests.examinations.soak.run import address, bytes_below, ended, processes

from ostinato.app.storage import Home, home
from ostinato.config import Config, load, save
from ostinato.serve.quotas import DAY_S, in_force, quota_of
from ostinato.testing.tiny import tiny_model

ROOT = Path(__file__).parents[3]
RESULT = Path(__file__).parents[1] / "results" / "siege.json"
TENANTS = ("acme", "bolt")  # the attacker and the honest one
CONTEXT = 32_768  # so long that prompts of 1 MB reach the tokenizer
EVERY_S = 15.0  # between two lines of progress
TIMES_SLOWER, TIMES_LARGER = 2.0, 1.5
ROW_BYTES = 2_048  # of an event beside its text, with its indices
SETTINGS = [
    "model.name='tiny'",
    "model.dtype='float32'",
    "model.numerics='fast'",  # a start takes seconds
    "listen.port=0",
    "reward.options={window=5.0}",
    "train.compute='fp32'",
    "train.publish='fp32'",
]


def configuration(directory: Path, keys: dict[str, str]) -> Config:
    """The defaults, on the tiny model."""
    model = tiny_model(directory / "model", context=CONTEXT)
    own = [f"run.directory='{directory / 'run'}'", f"model.source='{model}'"]
    named = ", ".join(f"'{tenant}:{key}'" for tenant, key in keys.items())
    return load(None, [*own, f"serve.api_keys=[{named}]", *SETTINGS])


@dataclass
class Run:
    """The run under siege."""

    config: Config
    place: Home
    output: Path
    process: subprocess.Popen[bytes]

    def workers(self) -> dict[str, psutil.Process]:
        return processes(psutil.Process(self.process.pid))

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.workers().items() if name != "reward"}

    def cpu_s(self) -> dict[str, float]:
        workers = self.workers()
        times = {name: process.cpu_times() for name, process in workers.items()}
        spent = {name: round(each.user + each.system, 1) for name, each in times.items()}
        helpers = [each.cpu_times() for each in helpers_of(workers["serve"])]
        return spent | {"serve's helpers": round(sum(each.user + each.system for each in helpers), 1)}

    def serve_mib(self) -> int:
        """Resident memory of the gateway, with the processes that it started."""
        serve = self.workers()["serve"]
        return sum(each.memory_info().rss for each in (serve, *helpers_of(serve))) >> 20

    def restarts(self) -> list[str]:
        said = self.output.read_text(errors="replace").splitlines()
        return [line for line in said if "starts again" in line or "cannot run" in line]

    def stalls(self) -> list[str]:
        """What the gateway's own watch wrote of an event loop that stood still for seconds."""
        said = self.place.worker_log("serve").read_text(errors="replace").splitlines()
        return [line for line in said if "has stood still" in line]

    def errors(self) -> list[str]:
        """Errors in the gateway's output."""
        said = self.place.worker_log("serve").read_text(errors="replace").splitlines()
        return [line[:300] for line in said if "Traceback" in line or " error " in line.lower()][:20]

    def files(self) -> dict[str, int]:
        """Bytes of each output file."""
        return {path.name: path.stat().st_size for path in sorted(self.place.worker_log("serve").parent.iterdir())}

    def quota_bytes(self, seconds: float) -> dict[str, float]:
        """What the quotas let the tenants have stored in this time, and how large the workers' outputs may become, in bytes."""
        texts = rows = 0.0
        for tenant in TENANTS:
            quota = quota_of(self.config.serve, tenant, TENANTS)
            day = 1e6 * quota.mb_per_day
            sent = quota.bytes_per_s * (seconds + 4)
            texts += min(sent, day * (1 + seconds / DAY_S)) if day else sent
            rows += ROW_BYTES * quota.events_per_s * (seconds + 4)
        return {"texts": texts, "rows": rows, "outputs": 3 * 1e6 * self.config.housekeeping.log_mb * len(self.pids())}


def helpers_of(serve: psutil.Process) -> list[psutil.Process]:
    """The processes that read long requests and try grammars for the gateway. Of one that is replaced the time is lost."""
    return [each for each in serve.children() if each.status() != psutil.STATUS_ZOMBIE]


async def phase(
    run: Run, url: str, key: str, seconds: float, say: Callable[[Felt], str], crew: Crew | None
) -> dict[str, Any]:
    """The honest tenant's figures over so many seconds."""
    felt, before, began = Felt(), run.cpu_s(), time.monotonic()
    living = asyncio.create_task(honest(url, key, felt))
    while (left := began + seconds - time.monotonic()) > 0 and run.process.poll() is None:
        await asyncio.wait({living}, timeout=min(EVERY_S, left))
        if living.done():
            living.result()
        print(f"{time.monotonic() - began:6.0f} s {say(felt)}", flush=True)
    living.cancel()
    await asyncio.wait({living})
    after = run.cpu_s()
    spent = {name: round(after[name] - before[name], 1) for name in after if name in before}
    beside = {} if crew is None else {"attackers": round(crew.cpu_s(), 1)}
    passed = time.monotonic() - began
    return {"seconds": round(passed), **felt.figures(), "processor s": spent | beside, "gateway MiB": run.serve_mib()}


def said(felt: Felt) -> str:
    calls = sorted(felt.calls)[-1:]
    worst = f"{1e3 * calls[0]:.0f} ms" if calls else "-"
    return f"honest: {len(felt.calls)} calls, longest {worst}, failures {dict(felt.failed)}"


async def besieged(run: Run, url: str, keys: dict[str, str], alone_s: float, siege_s: float, directory: Path) -> Any:
    """All phases."""
    found: dict[str, Any] = {}
    first = run.pids()
    attackers = await target(url, keys["acme"])
    await phase(run, url, keys["bolt"], 5.0, lambda felt: "warming up", None)
    found["alone"] = await phase(run, url, keys["bolt"], alone_s, lambda felt: f"alone; {said(felt)}", None)
    disk, began, crew = bytes_below(run.place.root), time.monotonic(), Crew(directory)
    try:
        crew.attack(attackers)

        def attacked(felt: Felt) -> str:
            made = sum(sum(counts.values()) for counts in crew.tally().outcomes.values())
            return f"{made} attacks; {said(felt)}; gateway {run.serve_mib()} MiB"

        found["under attack"] = await phase(run, url, keys["bolt"], siege_s, attacked, crew)
        found["attackers that ended"] = crew.ended()
        crew.stop()
        tally = crew.tally()
        found["disk"] = {"grew by MB": round((bytes_below(run.place.root) - disk) / 1e6, 1)}
        found["disk"] |= {
            f"may grow by MB: {name}": round(size / 1e6)
            for name, size in run.quota_bytes(time.monotonic() - began).items()
        }
        crew.keep_busy()
        found["beside busy loops"] = await phase(
            run, url, keys["bolt"], alone_s, lambda felt: f"busy; {said(felt)}", crew
        )
    finally:
        crew.stop()
    found |= {"attacks": {name: dict(counts) for name, counts in tally.outcomes.items()}, "wrong answers": tally.wrong}
    found |= {"processes at first": first, "processes at last": run.pids() if run.process.poll() is None else {}}
    found |= {"restarts": run.restarts(), "stalls": run.stalls(), "errors": run.errors(), "output files": run.files()}
    found["quotas"] = in_force(run.config.serve, TENANTS)
    return found


async def one_by_one(run: Run, url: str, keys: dict[str, str], seconds: float, directory: Path) -> None:
    """Each attack alone, for so many seconds. Prints what the honest tenant felt."""
    attackers, crew = await target(url, keys["acme"]), Crew(directory)
    for attack in (None, *ATTACKS):
        try:
            if attack is not None:
                crew.attack(attackers, [attack])
            row = await phase(run, url, keys["bolt"], seconds, lambda felt: "", crew)
        finally:
            crew.stop()
        name, spent = "none" if attack is None else attack.name, row["processor s"]
        print(
            f"{name:<36} calls {row['calls']}  health {row['health']}  serve {spent['serve']} s  {row['gateway MiB']} MiB",
            flush=True,
        )


async def examine(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    keys = {tenant: f"sk-{tenant}-{secrets.token_hex(12)}" for tenant in TENANTS}
    config, settings, output = configuration(directory, keys), directory / "siege.json", directory / "up.log"
    save(config, settings)
    environment = os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    with output.open("wb") as file:
        process = subprocess.Popen(  # noqa: ASYNC220 (nothing else runs yet)
            [sys.executable, "-m", "ostinato.cli", "up", "--config", str(settings)],
            env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
    run = Run(config, home(config), output, process)
    try:
        url = await address(run.place, process, ("live",))
        await asyncio.sleep(5.0)  # the others start after the gateway
        if args.each:
            await one_by_one(run, url, keys, args.each, directory)
            return {}
        found = await besieged(run, url, keys, args.alone, 60 * args.minutes, directory)
    finally:
        status = await ended(process)
    return {
        "machine": machine(),
        "minutes": args.minutes,
        "attacking processes": PROCESSES,
        **found,
        "exit status": status,
    }


def machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.processor()
    memory = psutil.virtual_memory().total >> 30
    return {"processor": processor, "cores": os.cpu_count(), "GiB": memory, "load": os.getloadavg()}


def verdict(found: dict[str, Any], limit: float) -> list[str]:
    """The violated requirements. `limit`: bytes of a worker's output file, of which one older part of twice the size is kept."""
    alone, attacked = found["alone"], found["under attack"]
    wrongs = [
        f"{count} times the honest tenant failed: {what}"
        for name in ("alone", "under attack", "beside busy loops")
        for what, count in found[name]["failures"].items()
    ]
    slower = attacked["calls"]["p99"] / alone["calls"]["p99"]
    if slower > TIMES_SLOWER:
        wrongs.append(
            f"calls' p99 under attack is {slower:.1f} times that of the first phase, {TIMES_SLOWER:g} at most"
        )
    if found["processes at first"] != found["processes at last"]:
        wrongs.append(f"other processes: {found['processes at first']}, then {found['processes at last']}")
    wrongs += [
        *found["restarts"],
        *found["stalls"],
        *(f"attackers ended: {code}" for code in found["attackers that ended"]),
    ]
    wrongs += not_right(found["attacks"])
    larger = max(found[name]["gateway MiB"] for name in ("under attack", "beside busy loops")) / alone["gateway MiB"]
    if larger > TIMES_LARGER:
        wrongs.append(f"the gateway's memory grew to {larger:.2f} times what it was, {TIMES_LARGER:g} at most")
    grew, *bounds = found["disk"].values()
    if grew > sum(bounds):
        wrongs.append(f"the disk grew by {grew} MB, {sum(bounds)} at most")
    for name, size in found["output files"].items():
        most = (2 if name.endswith(".1.log") else 1) * limit + 1e6  # and what is written in a second
        wrongs += [f"{name} has {size} bytes, {most:.0f} at most"] if size > most else []
    if found["exit status"]:
        wrongs.append(f"`ostinato up` ended with status {found['exit status']}")
    return wrongs


def show(found: dict[str, Any]) -> None:
    print(f"\n{'attack':<36}outcomes")
    for name, counts in found["attacks"].items():
        told = "  ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items()))
        print(f"{name:<36}{told}")
    print(
        f"\n{'honest, ms':<20}{'calls':>7}{'p50':>8}{'p99':>8}{'max':>8}{'feedback p99':>14}{'page p99':>10}{'health p99':>12}{'max':>8}"
    )
    for name in ("alone", "under attack", "beside busy loops"):
        row = found[name]
        calls, rest = row["calls"], [row[kind]["p99"] for kind in ("feedback", "page", "health")]
        told = f"{calls['count']:>7}{calls['p50']:>8}{calls['p99']:>8}{calls['max']:>8}{rest[0]:>14}{rest[1]:>10}{rest[2]:>12}"
        print(
            f"{name:<20}{told}{row['health']['max']:>8}   gateway {row['gateway MiB']} MiB, processor {row['processor s']}"
        )
    for name in ("disk", "output files", "quotas", "wrong answers", "errors"):
        print(f"{name}: {json.dumps(found[name])}")
    print("\n".join(f"FAILED: {line}" for line in found["problems"]) or "passed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all attacks at once")
    parser.add_argument(
        "--alone", type=float, default=60.0, help="seconds without attacks, and again beside busy loops"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--each", type=float, default=0.0, help="seconds of each attack alone")
    parser.add_argument("--directory", type=Path, help="keep the run here (default: a temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.alone = 0.5, 15.0
    with tempfile.TemporaryDirectory(prefix="siege-") as scratch:
        directory = args.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(examine(args, directory))
    if args.each:
        return
    found["problems"] = verdict(found, 1e6 * Config().housekeeping.log_mb)
    show(found)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
