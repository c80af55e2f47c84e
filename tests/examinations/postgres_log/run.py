"""Eight processes append to one log in Postgres and four read it: counts missed, duplicated and misplaced rows, and measures speed and lag.

``python -m tests.examinations.postgres_log.run --rows 10000000`` on a server of its own, on the disk of the temporary directory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fakes.postgres_server import MISSING, PostgresServer, binaries

from ostinato.record.config import RecordConfig
from ostinato.record.postgres.log import PostgresLog

RESULT = Path(__file__).parents[1] / "results" / "postgres_log.json"


def main() -> int:
    """Returns 1 if a row was missed, duplicated or out of order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--callers", type=int, default=16, help="in each writer")
    parser.add_argument("--each", type=int, default=1, help="rows of an append")
    parser.add_argument("--poll-s", type=float, default=0.02)
    args = parser.parse_args()
    found = binaries()
    if found is None:
        sys.exit(MISSING)
    server = PostgresServer(found, Path("/tmp"))  # on a real disk, where fsync has a cost
    try:
        server.start()
        result = examined(server, args)
    finally:
        server.remove()
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(bool(result["missed"] or result["doubled"] or result["out_of_order"]))


def examined(server: PostgresServer, args: argparse.Namespace) -> dict[str, object]:
    config = RecordConfig(url=server.url, append_s=60)
    PostgresLog.open(config).close()
    settings, share = config.model_dump_json(), args.rows // args.writers
    rows = share * args.writers

    def client(*arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.fakes.log_clients", *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    with tempfile.TemporaryDirectory() as folder:
        readers = [client("follow", settings, rows, args.poll_s) for _ in range(args.readers)]
        began = time.monotonic()
        writers = [
            client("write", settings, f"w{i}", share, args.callers, args.each, f"{folder}/{i}")
            for i in range(args.writers)
        ]
        if any(writer.wait() for writer in writers):
            sys.exit("a writer failed")
        wall_s = time.monotonic() - began
        seen = [json.loads(reader.communicate()[0]) for reader in readers]
    return {
        "rows": rows,
        "missed": sum(rows - reader["different"] for reader in seen),
        "doubled": sum(reader["newest"] - reader["different"] for reader in seen),
        "out_of_order": sum(reader["out_of_order"] for reader in seen),
        "writers": args.writers,
        "readers": args.readers,
        "callers": args.callers,
        "rows_each": args.each,
        "rows_a_second": rows / wall_s,
        "appends_a_second": rows / args.each / wall_s,
        "wall_s": wall_s,
        "lag_ms": [{"p50": reader["lag_p50_ms"], "p99": reader["lag_p99_ms"]} for reader in seen],
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
