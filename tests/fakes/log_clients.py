"""Processes that write concurrently to one log in Postgres, and readers that check that they see every row once, in order."""

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.contract.test_log import SIGNAL

from ostinato.core.records import Signal
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.log import PostgresLog


async def write(config: RecordConfig, name: str, rows: int, callers: int, each: int, acknowledged: Path) -> None:
    """Append `rows` rows named after `name`, and write a line to `acknowledged` for each acknowledged append before the next."""
    told = acknowledged.open("a")

    async def call(caller: int) -> None:
        for start in range(caller * each, rows, callers * each):
            numbers = range(start, min(rows, start + each))
            now = time.monotonic()  # all processes share one machine's clock, so the row can carry its time of sending
            batch = [replace(SIGNAL, id=f"{name}/{n}", received_at=now) for n in numbers]
            await log.append(*batch)
            told.write(f"{numbers[0]} {numbers[-1]}\n")
            told.flush()

    with PostgresLog.open(config) as log:
        await asyncio.gather(*map(call, range(callers)))


async def follow(config: RecordConfig, rows: int, poll_s: float) -> dict[str, object]:
    """Read from the first row until `rows` different ones came. Returns counts of misplaced and different rows, and their lags."""
    cursor, names, out_of_order, lags = 0, set[str](), 0, []
    with PostgresLog.open(config) as log:
        while len(names) < rows:
            async for place, row in log.read(cursor, {Signal}):
                out_of_order += place != cursor + 1
                cursor = place
                assert isinstance(row, Signal)
                names.add(row.id)
                lags.append(time.monotonic() - row.received_at)
            await asyncio.sleep(poll_s)
    lags.sort()
    return {
        "newest": cursor,
        "different": len(names),
        "out_of_order": out_of_order,
        "lag_p50_ms": 1e3 * lags[len(lags) // 2],
        "lag_p99_ms": 1e3 * lags[len(lags) * 99 // 100],
    }


def main() -> None:
    """``write CONFIG NAME ROWS CALLERS EACH FILE`` or ``follow CONFIG ROWS POLL_S``, which prints JSON."""
    what, config, *rest = sys.argv[1:]
    settings = RecordConfig.model_validate_json(config)
    if what == "write":
        name, rows, callers, each, file = rest
        asyncio.run(write(settings, name, int(rows), int(callers), int(each), Path(file)))
    else:
        sys.stdout.write(json.dumps(asyncio.run(follow(settings, int(rest[0]), float(rest[1])))))


if __name__ == "__main__":
    main()
