"""The attackers' processes, and the busy loops that take as many of the processors in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tests.examinations.siege.attacker import Tally
from tests.examinations.siege.attacks import ATTACKS, Attack
from tests.examinations.siege.wire import Target

ROOT = Path(__file__).parents[3]
PROCESSES = 4
CROWD = 100  # lanes: attacks of many connections are a process of their own, so that the others are quick
BUSY = "from tests.examinations.siege.attacker import step_back\nstep_back()\nwhile True: pass"
UNDER_FAULTS = frozenset({"503", "507", "404", "closed", "cut", "refused", "late"})
"""What an attack may meet besides its right answers while the gateway is killed, stopped or out of room, and old turns are dropped."""


async def target(url: str, key: str) -> Target:
    """The gateway at `url` as the tenant with this key attacks it, which asks for a turn of its own first."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    asked = aiohttp.request("POST", f"{url}/v1/chat/completions", json=body, headers={"x-api-key": key})
    async with asked as response:
        response.raise_for_status()
        turn = (await response.json())["ostinato"]["turns"][0]
    return Target(host=host, port=int(port), key=key, turn=turn)


class Crew:
    """The attackers of one gateway. Example: ``crew = Crew(directory); crew.attack(target); ...; crew.stop()``"""

    def __init__(self, directory: Path) -> None:
        self._tallies = [directory / f"attacker{number}.json" for number in range(PROCESSES)]
        self._running = list[subprocess.Popen[bytes]]()

    def attack(self, target: Target, attacks: Sequence[Attack] = ATTACKS) -> None:
        """Start these attacks."""
        crowds = [attack for attack in attacks if attack.lanes >= CROWD]
        others = [attack for attack in attacks if attack.lanes < CROWD]
        shares = [crowds, *(others[number :: PROCESSES - 1] for number in range(PROCESSES - 1))]
        for share, path in zip(shares, self._tallies, strict=True):
            if not share:
                continue
            names = [attack.name for attack in share]
            words = ["--target", json.dumps(asdict(target)), "--attacks", json.dumps(names), "--tally", str(path)]
            self._start("-m", "tests.examinations.siege.attacker", *words)

    def keep_busy(self) -> None:
        """Start as many busy loops instead."""
        for _ in self._tallies:
            self._start("-c", BUSY)

    def _start(self, *words: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *words]
        self._running.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True))

    def cpu_s(self) -> float:
        """Processor time of those that run, in seconds."""
        spent = [psutil.Process(each.pid).cpu_times() for each in self._running if each.poll() is None]
        return sum(times.user + times.system for times in spent)

    def ended(self) -> list[int]:
        """The exit statuses of those that ended by themselves, which none should."""
        return [each.returncode for each in self._running if each.poll() is not None]

    def stop(self) -> None:
        """End all of them."""
        for each in self._running:
            each.terminate()
        for each in self._running:
            try:
                each.wait(20)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self._running.clear()

    def tally(self) -> Tally:
        """What has come of the attacks so far."""
        whole = Tally()
        for path in self._tallies:
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                whole.outcomes |= {name: Counter(counts) for name, counts in found["outcomes"].items()}
                whole.wrong += found["wrong"]
        return whole


def not_right(outcomes: Mapping[str, Mapping[str, int]], also: frozenset[str] = frozenset()) -> list[str]:
    """The attacks that had outcomes which are not right, or were never made, or were only put off."""
    found: list[str] = []
    for attack in ATTACKS:
        counts = outcomes.get(attack.name, {})
        bad = {name: count for name, count in counts.items() if name not in attack.right | also}
        found += [f"{attack.name}: outcomes {bad}, right are {', '.join(sorted(attack.right))}"] if bad else []
        if not counts.keys() - {"429"}:
            found.append(f"{attack.name}: never got through ({dict(counts)})")
    return found
