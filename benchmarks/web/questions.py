"""The latency of the page's queries on an index of many turns and releases: median and longest, in milliseconds.

    python -m benchmarks.web.questions --turns 1000000 --releases 10000

The index is filled by SQL, with the rows that the writer would have written. The queries are those that the page makes. A query that
is given up at its deadline counts with the time until then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from ostinato.status.index_queries import LONGEST_S, IndexQueries, TooWide, TurnQuery
from ostinato.status.log_index import open_index

RESULTS = Path(__file__).parents[1] / "results"
USERS = 5_000


def fill(path: Path, turns: int, releases: int, offset: int = 0) -> float:
    """Make the index, with its places in the log shifted by `offset`. Returns the seconds this took."""
    began = time.perf_counter()
    db = open_index(path)
    db.execute("BEGIN")
    place = f"4 * i + {offset}"
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    db.execute(
        f"{count} INSERT INTO turns SELECT {place}, 'chatcmpl-' || i || ':0', 'tenant' || (i % 7), 'user' || ((i * 7919) % {USERS}), "
        "CASE i % 5 WHEN 0 THEN 'control' ELSE 'live' END, i / 1000, 1.0 * i, "
        "CASE WHEN i % 5 = 0 THEN 'arm:control' WHEN i % 97 = 0 THEN 'finish:abort' ELSE 'trained' END, 4, i % 2, i / 100, 1 FROM n",
        (turns,),
    )
    db.execute(
        f"{count} INSERT INTO words(rowid, text) SELECT {place}, 'a red fox says word' || (i % 9973) || ' to user' || (i % 31) FROM n",
        (turns,),
    )
    db.execute(
        f"{count} INSERT INTO versions SELECT printf('%064x', i * 2654435761), {place} + 1, i, 'shipped', 'SHIP', 0.01, -0.02, 0.04, 0.1, "
        "2, 'not worse than the margin', 1.0 * i FROM n",
        (releases,),
    )
    db.execute(
        f"{count} INSERT INTO events SELECT {place} + 1, i || ':shipped', 'shipped', i, printf('%064x', i * 2654435761), i - 1, "
        "printf('%064x', (i - 1) * 2654435761), 'not worse than the margin', 1.0 * i FROM n",
        (releases,),
    )
    db.execute(
        f"{count} INSERT INTO chain (hash, number) SELECT printf('%064x', i * 2654435761), i FROM n", (releases,)
    )
    db.execute("INSERT INTO outcomes VALUES ('trained'), ('arm:control'), ('finish:abort')")
    db.execute("COMMIT")
    db.close()
    return time.perf_counter() - began


def measured(ask: IndexQueries, turns: int, releases: int, repeats: int) -> list[dict[str, object]]:
    """One row per query."""
    middle = 2 * turns
    queries = {
        "newest turns": TurnQuery(),
        "turns half-way back": TurnQuery(before=middle),
        "one user's": TurnQuery(user="user17"),
        "one user's of a tenant": TurnQuery(user="user17", tenant="tenant3"),
        "one tenant's": TurnQuery(tenant="tenant3"),
        "an arm's": TurnQuery(arm="control"),
        "a version's": TurnQuery(version=turns // 2000),
        "a rare outcome": TurnQuery(outcome="finish:abort"),
        "a word that is everywhere": TurnQuery(text="fox"),
        "a rare word": TurnQuery(text="word77"),
        "a common word of one user": TurnQuery(text="fox", user="user17"),
        "nobody's": TurnQuery(user="nobody", arm="live"),
    }
    asked = {name: (lambda query=query: ask.turns(query)) for name, query in queries.items()}
    asked |= {
        "newest releases": lambda: ask.releases(None),
        "releases half-way back": lambda: ask.releases(2 * releases),
        "one release": lambda: ask.release(f"{releases // 2 * 2654435761:064x}"),
        "releases to mark in charts": lambda: ask.shipped(200),
        "first release of a step": lambda: ask.shipped_since(releases // 2),
        "alarms": lambda: ask.alarms(None),
    }
    rows: list[dict[str, object]] = []
    for name, question in asked.items():
        times, given_up = [], 0
        for _ in range(repeats):
            began = time.perf_counter()
            try:
                question()
            except TooWide:
                given_up += 1
            times.append(1e3 * (time.perf_counter() - began))
        rows.append(
            {"question": name, "median_ms": statistics.median(times), "longest_ms": max(times), "given_up": given_up}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--releases", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--name", default="page")
    asked = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.sqlite"
        filled_s = fill(path, asked.turns, asked.releases)
        megabytes = sum(each.stat().st_size for each in path.parent.glob("page.sqlite*")) / 1e6
        rows = measured(IndexQueries(path), asked.turns, asked.releases, asked.repeats)
    print(
        f"{asked.turns:,} turns, {asked.releases:,} releases: {megabytes:.0f} MB, filled in {filled_s:.0f} s; load {load[0]:.1f}"
    )
    print(f"{'question':30} {'median ms':>10} {'longest ms':>11} {'given up at ' + f'{1e3 * LONGEST_S:.0f} ms':>18}")
    for row in rows:
        print(f"{row['question']:30} {row['median_ms']:10.2f} {row['longest_ms']:11.2f} {row['given_up']:>18}")
    RESULTS.mkdir(exist_ok=True)
    result = {
        "turns": asked.turns,
        "releases": asked.releases,
        "megabytes": megabytes,
        "filled_s": filled_s,
        "load_at_start": load,
        "cpus": os.cpu_count(),
        "rows": rows,
    }
    (RESULTS / f"{asked.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
