"""Two gateways, a trainer and a standby, a release worker and four followers on hosts that share only a network, under network and
host faults.

``python -m tests.examinations.hosts.run [--tiny] [--minutes 40] [--seed 0]``

Thirteen hosts, each with namespaces of its own and a disk that no other sees: Postgres, an object store, the above, the demo's simulated
users, an operator. The faults: round trips of 20 to 50 ms; a gateway, the trainer (for longer than its lease) and the release
worker cut off from Postgres, a follower from the store, so that packets are lost; Postgres killed with -9; a power failure of a gateway's
host. The only repairs are those that a person would make: Postgres is restarted, and the host is switched on again.

Passes if nothing acknowledged is lost or duplicated, each batch and release exists once, the turns add up, all followers end at the same
root with the same bytes, and requests failed only where and as the guide says. Writes results/hosts.json (with --tiny only if --out is
given). Needs root, TUN devices, Postgres and moto.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.examinations.hosts.figures import Evidence, judge, lines
from tests.examinations.hosts.lab import PLACE, Lab, Process, missing
from tests.examinations.hosts.servers import PostgresHost, start_bucket
from tests.examinations.hosts.settings import (
    CREWS,
    FOLLOWERS,
    GATEWAYS,
    HOSTS,
    SECRETS,
    TRAINERS,
    Plan,
    furnish,
    url,
    words,
)
from tests.examinations.hosts.storm import Storm
from tests.fakes import postgres_server

RESULT = Path(__file__).parents[1] / "results" / "hosts.json"
_START_S, _LEAVE_S, _SETTLE_S = 600.0, 240.0, 120.0


class Staging:
    """The lab with everything that the run needs."""

    def __init__(self, lab: Lab, plan: Plan) -> None:
        self.lab, self.plan = lab, plan
        self.log = PostgresHost(lab["log"])
        self.crews: dict[str, Process] = {}

    def start(self) -> Process:
        """Start servers, workers, followers and users. Returns the users' process."""
        furnish(self.lab, self.plan)
        self.log.make()
        start_bucket(self.lab["bucket"])
        for name in CREWS:
            self.start_crew(name)
        for name in FOLLOWERS:
            self._python(name, "follower", "follower", PLACE / "follower.jsonl")
        scenario = "letters" if self.plan.tiny else "copilot"
        asked = [60 * self.plan.minutes, self.plan.users, self.plan.seed, scenario]
        return self._python("users", "users", "users", PLACE / "users.jsonl", *map(self.url, GATEWAYS), *asked)

    def url(self, name: str) -> str:
        return url(self.lab[name])

    def start_crew(self, name: str) -> None:
        self.crews[name] = self._python(name, "crew", "crew", ",".join(CREWS[name]))

    def reboot(self, name: str) -> None:
        """Boot a host after its power failure, and start its workers."""
        self.lab[name].boot()
        self.start_crew(name)

    def at_work(self) -> str:
        """The trainer that took the last step."""
        last = {
            name: [line["at"] for line in self.written(name, "run/train.jsonl") if line["kind"] == "step"]
            for name in TRAINERS
        }
        return max(TRAINERS, key=lambda name: max(last[name], default=0.0))

    def _python(self, host: str, name: str, module: str, *arguments: object) -> Process:
        own = words(self.lab, self.lab[host], self.plan)
        command = [sys.executable, "-m", f"tests.examinations.hosts.{module}", *arguments, *own]
        return self.lab[host].start(name, *command, **SECRETS)

    def ostinato(self, *command: str) -> str:
        """Run a command on the operator's host. Returns its output."""
        own = [part for word in words(self.lab, self.lab["operator"], self.plan) for part in ("--set", word)]
        return self.lab["operator"].run(sys.executable, "-m", "ostinato.cli", *command, *own, **SECRETS)

    def audit(self, what: str, began: float = 0.0, ended: float = 0.0) -> dict[str, Any]:
        """The operator's view of log, store and gateways, or of refs and gateways only."""
        urls = ",".join(map(self.url, GATEWAYS))
        own = words(self.lab, self.lab["operator"], self.plan)
        command = [sys.executable, "-m", "tests.examinations.hosts.audit", what, began, ended, urls, *own]
        return json.loads(self.lab["operator"].run(*command, **SECRETS))

    def written(self, host: str, name: str) -> list[dict[str, Any]]:
        """The lines of a file on a host."""
        return lines(self.lab[host].directory / name)


def examine(staging: Staging) -> dict[str, Any]:
    """Run the whole examination. Returns its findings."""
    lab, plan = staging.lab, staging.plan
    grounds = lab.check()
    users = staging.start()
    began = _until("people are served", _START_S, users, lambda: _noted(staging, "began"))
    print(f"{time.strftime('%H:%M:%S')} both gateways serve", flush=True)
    storm = Storm(lab, plan, staging.log, staging.reboot, staging.at_work, lambda: users.running)
    storm.rage()
    status = users.wait(60 * plan.minutes + _LEAVE_S)
    ended = _noted(staging, "ended") or time.time()
    print(f"{time.strftime('%H:%M:%S')} the users left", flush=True)
    time.sleep(plan.window_s + 3.0)
    settled = settle(staging)
    facts = staging.audit("all", began, ended)
    checks = {name: _said(staging, *command) for name, command in (("fsck", ("weights", "fsck")), ("replay", ("weights", "replay")))
              if name == "fsck" or plan.replay}  # fmt: skip
    print(f"{time.strftime('%H:%M:%S')} the store and the log were checked", flush=True)
    evidence = Evidence(
        grounds=grounds,
        facts=facts,
        users=staging.written("users", "users.jsonl"),
        followers={name: staging.written(name, "follower.jsonl") for name in FOLLOWERS},
        gateways={name: staging.written(name, "run/serve.jsonl") for name in GATEWAYS},
        trainers={name: staging.written(name, "run/train.jsonl") for name in TRAINERS},
        crews={name: staging.written(name, "crew.log") for name in CREWS},
        alive=all(process.running for process in staging.crews.values()),
        events=storm.events,
        wire=lab.tell_wire({"count": True}),
        users_status=status,
    )
    found = {
        "tiny": plan.tiny,
        "minutes": plan.minutes,
        "users": plan.users,
        "seed": plan.seed,
        "cores": os.cpu_count(),
    }
    found |= (
        {"events": [asdict(event) for event in storm.events]}
        | judge(evidence, learns=not plan.tiny)
        | {"settled": settled}
        | checks
    )
    if not settled["all at what is live"]:
        found["problems"].append(f"not all were at what is live after {_SETTLE_S:g} s")
    found["problems"] += [f"{name}: {said[:300]}" for name, said in checks.items() if said.startswith("FAILED")]
    return found


def settle(staging: Staging) -> dict[str, Any]:
    """Stop trainers and release worker, roll back live by hand, and wait until all followers and gateways have the live version.

    Returns whether they got it, and the seconds this took.
    """
    for name in ("trainer-1", "trainer-2", "release"):
        staging.crews[name].send(signal.SIGTERM)
    for name in ("trainer-1", "trainer-2", "release"):
        staging.crews.pop(name).wait(60)
    staging.audit("refs")  # so that the operator's directory names the run's log; without it no command finds the run
    try:
        told = staging.ostinato("rollback", "--reason", "the examination's last act")
    except RuntimeError as error:  # nothing was released
        told = str(error)[-300:]
    begun = time.monotonic()
    while True:
        facts = staging.audit("refs")
        live = facts["refs"]["live"]
        at = [_last(staging.written(name, "follower.jsonl"), "live") for name in FOLLOWERS]
        at += [served.get("live", "") for served in facts["slots"]]
        passed = time.monotonic() - begun
        if set(at) == {live} or passed > _SETTLE_S:
            return {
                "all at what is live": set(at) == {live},
                "after s": round(passed, 1),
                "rollback": " ".join(told.split()),
            }
        time.sleep(1.0)


def _last(lines: list[dict[str, Any]], ref: str) -> str:
    return next((line["hash"] for line in reversed(lines) if line["kind"] == "have" and line["ref"] == ref), "")


def _said(staging: Staging, *command: str) -> str:
    try:
        return " ".join(staging.ostinato(*command).split())
    except RuntimeError as error:
        return f"FAILED: {error}"


def _noted(staging: Staging, kind: str) -> float | None:
    return next((line["at"] for line in staging.written("users", "users.jsonl") if line["kind"] == kind), None)


def _until(what: str, timeout_s: float, process: Process, ask: Any) -> float:
    ends = time.monotonic() + timeout_s
    while (found := ask()) is None:
        if time.monotonic() > ends or not process.running:
            raise TimeoutError(f"{what}: not after {timeout_s:g} s, or {process.name} has ended; see its log")
        time.sleep(0.5)
    return found


def main() -> int:
    """Returns 1 if a requirement is violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of six minutes with a model that says nothing")
    parser.add_argument("--minutes", type=float, help="of traffic (default: 40, of the tiny model 2.5)")
    parser.add_argument("--users", type=int, help="default: 24, of the tiny model 16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--replay", action="store_true", help="train again from the log, and compare (always with --tiny)"
    )
    parser.add_argument("--keep", type=Path, help="copy the hosts' logs to this directory at the end")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if (why := missing()) or (why := postgres_server.binaries() is None and postgres_server.MISSING):
        sys.exit(str(why))
    plan = Plan(
        tiny=args.tiny,
        minutes=args.minutes or (2.5 if args.tiny else 40.0),
        users=args.users or (16 if args.tiny else 24),
        seed=args.seed,
        replay=args.replay or args.tiny,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    with Lab(HOSTS) as lab:
        try:
            found = examine(Staging(lab, plan))
        finally:
            if args.keep:
                lab.keep_logs(args.keep)
    table = Table(show_header=False)
    for name, value in found.items():
        table.add_row(name, json.dumps(value) if isinstance(value, dict | list) else str(value))
    Console().print(table)
    if out := args.out or (None if args.tiny else RESULT):
        out.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
