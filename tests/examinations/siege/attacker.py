"""A process of attackers: some of the attacks, over and over, until it is told to end.

    python -m tests.examinations.siege.attacker --target JSON --attacks JSON --tally FILE

It steps back: all processes of the run have the processors first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.examinations.siege.attacks import ATTACKS, Attack, Attacker, Sending
from tests.examinations.siege.wire import Target, outcome

SAVE_S = 2.0
_EXAMPLES = 5


@dataclass
class Tally:
    """Outcomes by attack, and the first that were not right."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    wrong: list[str] = field(default_factory=list[str])

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"outcomes": self.outcomes, "wrong": self.wrong}))
        partial.replace(path)


def address(attack: Attack, lane: int) -> str:
    """The address that a lane comes from."""
    return attack.sources[lane % len(attack.sources)] if attack.sources else f"127.0.1.{ATTACKS.index(attack) + 1}"


async def besiege(attacks: Sequence[Attack], target: Target, tally: Tally, most_lanes: int = 1 << 20) -> None:
    """Attack until cancelled."""

    async def lane(attack: Attack, number: int) -> None:
        attacker = Attacker(target=target, source=address(attack, number))
        counts = tally.outcomes.setdefault(attack.name, Counter())
        while True:
            answer = await outcome(attack.play(attacker))
            counts[answer.outcome] += 1
            if answer.outcome not in attack.right and counts[answer.outcome] <= _EXAMPLES:
                said = answer.said.decode(errors="replace")
                tally.wrong.append(f"{time.strftime('%H:%M:%S')} {attack.name}: {answer.outcome} {said}")
            await asyncio.sleep(attack.pause_s)

    for attack in attacks:
        if isinstance(attack.play, Sending):
            attack.play.ready()
    async with asyncio.TaskGroup() as group:
        for attack in attacks:
            for number in range(min(attack.lanes, most_lanes)):
                group.create_task(lane(attack, number))


def step_back() -> None:
    """Leave the processors to everybody else. The session's own weight comes first where the kernel groups processes by session."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    for _ in range(20):  # the kernel takes one change in 0.1 s
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
            return
        time.sleep(0.11)


async def attack_until_told(attacks: Sequence[Attack], target: Target, path: Path) -> None:
    """Attack until SIGTERM, and save the tally every other second."""
    tally = Tally()
    attacking = asyncio.create_task(besiege(attacks, target, tally))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, attacking.cancel)
    while not attacking.done():
        await asyncio.wait({attacking}, timeout=SAVE_S)
        tally.save(path)
    if not attacking.cancelled():
        attacking.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=json.loads, required=True)
    parser.add_argument("--attacks", type=json.loads, required=True, help="their names")
    parser.add_argument("--tally", type=Path, required=True)
    args = parser.parse_args()
    step_back()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    chosen = [attack for attack in ATTACKS if attack.name in args.attacks]
    asyncio.run(attack_until_told(chosen, Target(**args.target), args.tally))


if __name__ == "__main__":
    main()
