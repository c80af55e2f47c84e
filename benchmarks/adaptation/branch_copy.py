"""What the copying of a tenant's rows into its branch's log costs the branch's trainer: CPU time a turn, at several rates of turns.

`python -m benchmarks.adaptation.branch_copy` writes turns of two tenants with their deliveries and signals, and copies one tenant's after
every so many, as a trainer does between its steps. Prints rows a second, and the share of a core that this takes at two rates of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace

from ostinato.app.branches import TenantRows, branch_config
from ostinato.app.storage import open_log, open_run
from ostinato.config import load
from ostinato.core.records import Arm, Delivered, Row
from ostinato.testing.records import a_signal, a_turn

KEYS = "serve.api_keys=['acme:sk-acme-0123456789abcdef', 'bolt:sk-bolt-0123456789abcdef']"
ROWS = 3  # a turn's: itself, its delivery, a signal


def rows_of(number: int, tokens: int) -> list[Row]:
    """A turn of one of two tenants by turns, with its delivery and a signal."""
    made = a_turn(f"t{number}", prompt=range(3 * tokens), sampled=range(tokens))
    arm = Arm.LIVE if number % 2 else Arm.BRANCH
    made = replace(made, tenant="bolt" if number % 2 else "acme", arm=arm, user=f"u{number % 97}")
    return [
        made,
        Delivered(id=f"d{number}", turns=(made.id,), at=11.0),
        a_signal(made, "accepted", id=f"s{number}"),
    ]


async def cost(turns: int, each: int, tokens: int, encrypt: str) -> float:
    """Seconds of CPU time that the copying took a turn of the whole log, with a copy after every `each` turns."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"run.directory='{folder}/run'", KEYS, "serve.branches=['acme']", "learn.tenants=['acme']"]
        config = load(None, [*words, f"record.encrypt='{encrypt}'"])
        with open_log(config) as log, open_run(branch_config(config, "acme")) as run:
            copying, spent = TenantRows(run), 0.0
            for first in range(0, turns, each):
                for number in range(first, first + each):
                    await log.append(*rows_of(number, tokens))
                began = time.process_time()
                await copying.copy()
                spent += time.process_time() - began
            copying.close()
    return spent / turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    for encrypt in ("none", "user"):
        for each in (1, 100):
            seconds = asyncio.run(cost(given.turns, each, given.tokens, encrypt))
            hour, second = 100 * seconds * 1000 / 3600, 100 * seconds * 100
            print(
                f"encrypt={encrypt}, a copy after {each} turns: {1000 * seconds:.2f} ms a turn, {ROWS / seconds:,.0f} rows a second; "
                f"1,000 turns an hour take {hour:.3f}% of a core, 100 a second {second:.0f}%"
            )


if __name__ == "__main__":
    main()
