"""Turns the times recorded by followers and lines in links.py into figures per follower, and into tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

_Row = dict[str, Any]


def measured(
    versions: Sequence[_Row],
    heard: Sequence[Sequence[_Row]],
    passed: Sequence[Sequence[_Row]],
    bytes_s: float,
    round_trips: Sequence[int],
) -> _Row:
    """The figures of one run. `same_root`: the last version reached every follower with its own root."""
    followers = [
        {"round_trip_ms": ms, **_follower(versions, said, through, bytes_s)}
        for ms, said, through in zip(round_trips, heard, passed, strict=True)
    ]
    roots = {one["root"] for one in versions[-1:]} | {one["final_root"] for one in followers}
    deltas = [one for one in versions if one["kind"] == "delta"]
    return {
        "same_root": len(roots) == 1,
        "full_bytes": versions[0]["full_bytes"],
        "full_payload_bytes": versions[0]["bytes"],
        "delta_bytes": [one["bytes"] for one in deltas],
        "changed": [one["changed"] for one in deltas],
        "publish_s": [one["publish_s"] for one in deltas],
        "followers": followers,
    }


def _follower(versions: Sequence[_Row], said: Sequence[_Row], through: Sequence[_Row], bytes_s: float) -> _Row:
    delivered = [one for one in said if "number" in one]
    roots = {one["number"]: one["root"] for one in versions}
    deltas = [one for one in versions if one["kind"] == "delta"]
    lags = [_first(delivered, one["number"])["at"] - one["at"] for one in deltas]
    steps = [one for one in delivered if one["number"] in {delta["number"] for delta in deltas}]
    return {
        "delivered": len(delivered),
        "skipped": len(versions) - len({one["number"] for one in delivered}),
        "wrong": sum(one["root"] != roots[one["number"]] or one["hash"] != one["root"] for one in delivered),
        "errors": [one["error"] for one in said if "error" in one],
        "final_root": delivered[-1]["root"],
        "lag_s": lags,
        "noticed_to_delivered_s": [one["at"] - one["calls"][0][2] for one in steps],
        "reads_per_version": Counter(" > ".join(call[0] for call in one["calls"]) for one in steps),
        "fetched_bytes": sum(one["bytes"] for one in through),
        "requests": len(through),
        "requests_by_kind": Counter(_kind(one) for one in through),
        "connections": sum(one["fresh"] for one in through),
        "refused": sum(one["fate"] == "refused" for one in through),
        "cut": sum(one["fate"] == "cut" for one in through),
        "left": sum(one["fate"] == "left" for one in through),
        **_repeated(through),
        "full": [_full(one, delivered, through, bytes_s) for one in versions if one["kind"] == "full"],
    }


def _first(delivered: Sequence[_Row], number: int) -> _Row:
    """The delivery of this version or, if it was overtaken, of the next one delivered."""
    return next(one for one in delivered if one["number"] >= number)


def _kind(one: _Row) -> str:
    path = one["path"]
    return "ref version" if "/refs/version/" in path else "ref live" if "/refs/" in path else "object"


def _repeated(through: Sequence[_Row]) -> _Row:
    """The retries of failed requests: their number, and the wait before each."""
    waits: list[float] = []
    for at, one in enumerate(through):
        if one["fate"] in ("refused", "cut"):
            reached = range(one["start"], one["start"] + one["bytes"] + 1)
            same = (again for again in through[at + 1 :] if again["path"] == one["path"] and again["start"] in reached)
            waits += [again["began"] - one["ended"] for again in same if again["began"] >= one["ended"]][:1]
    return {"retries": len(waits), "retry_wait_s": waits}


def _full(version: _Row, delivered: Sequence[_Row], through: Sequence[_Row], bytes_s: float) -> _Row:
    """The share of the line that a full transfer used: while payload flowed, until it was decoded and verified, and from the ref's move."""
    delivery = _first(delivered, version["number"])
    looked = delivery["calls"][0][2]
    payload = [call for call in delivery["calls"] if call[0] == "object" and call[1] != version["manifest"]]
    names = {f"/{name[:2]}/{name[2:]}" for _, name, *_ in payload}
    mine = [one for one in through if one["path"][-66:] in names and one["began"] >= looked]
    size = sum(call[4] for call in payload)
    first, last = min(one["first"] for one in mine if one["bytes"]), max(one["ended"] for one in mine)
    return {
        "bytes": size,
        "sent_bytes": sum(one["bytes"] for one in mine),
        "failures": sum(one["fate"] != "whole" for one in mine),
        "line_share": size / (last - first) / bytes_s,
        "decoded_share": size / (delivery["at"] - first) / bytes_s,
        "noticed_share": size / (delivery["at"] - looked) / bytes_s,
        "whole_share": size / (delivery["at"] - version["at"]) / bytes_s,
        "first_byte_s": first - looked,
        "seconds": delivery["at"] - version["at"],
    }


# ---------------------------------------------------------------- tables


def tables(result: _Row) -> Iterator[Table]:
    settings = result["settings"]
    if result["trainer"]:
        yield _trainer(result["trainer"], settings)
    yield _lag(result["runs"], settings)
    yield _line(result["runs"], settings, result["uncapped_bytes_s"])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    return table


def _ms(values: Iterable[float], share: float) -> str:
    found = list(values)
    return f"{np.quantile(found, share):.2f} s" if found else "-"


def _spread(values: Sequence[float]) -> str:
    """Median and range."""
    middle, low, high = np.median(values), min(values), max(values)
    return f"{middle:.1%} ({low:.1%} to {high:.1%})" if len(values) > 1 else f"{middle:.1%}"


def _pooled(runs: Sequence[_Row], at: int) -> list[_Row]:
    return [run["followers"][at] for run in runs]


def _lag(runs: Sequence[_Row], settings: _Row) -> Table:
    size = np.median([size for run in runs for size in run["delta_bytes"]] or [0])
    table = _table(
        f"{settings['versions']} deltas of {size / 1e6:.2f} MB (median) every {settings['every']:g} s, "
        f"refs looked at every {settings['interval']:g} s, {len(runs)} runs; lag: the ref's move to verified weights",
        *("round trip", "delivered", "overtaken", "lag p50", "p90", "max", "look to weights p50", "reads in a row"),
        *("requests", "503", "cut", "retries", "errors", "root"),
    )
    for at, first in enumerate(runs[0]["followers"]):
        found = _pooled(runs, at)
        lags = [lag for one in found for lag in one["lag_s"]]
        reads = sum((Counter(one["reads_per_version"]) for one in found), Counter[str]())
        usual = reads.most_common(1)[0][0] if reads else ""
        table.add_row(
            f"{first['round_trip_ms']} ms",
            str(sum(one["delivered"] for one in found)),
            str(sum(one["skipped"] for one in found)),
            *(_ms(lags, share) for share in (0.5, 0.9, 1)),
            _ms((wait for one in found for wait in one["noticed_to_delivered_s"]), 0.5),
            str(len(usual.split(" > "))) if usual else "-",
            *(str(sum(one[key] for one in found)) for key in ("requests", "refused", "cut", "retries")),
            str(sum(len(one["errors"]) for one in found)),
            "equal" if all(run["same_root"] for run in runs) and not any(one["wrong"] for one in found) else "DIFFERS",
        )
    return table


def _line(runs: Sequence[_Row], settings: _Row, rate: float) -> Table:
    cap = settings["cap"]
    table = _table(
        f"Full transfers of {runs[0]['full_payload_bytes'] / 1e6:.0f} MB; share of {cap} Mbit/s "
        f"(server and proxies carry {rate * 8 / 1e6:.0f} Mbit/s for all four), median and range of {len(runs)} runs",
        *(
            "round trip",
            "transfer",
            "first to last byte",
            "and decoded, verified",
            "look to weights",
            "ref to weights",
            "seconds",
            "fetched",
        ),
    )
    for at, first in enumerate(runs[0]["followers"]):
        for which, name in enumerate(("cold", "warm")[: len(first["full"])]):
            found = [one["full"][which] for one in _pooled(runs, at)]
            table.add_row(
                f"{first['round_trip_ms']} ms",
                name,
                *(
                    _spread([one[key] for one in found])
                    for key in ("line_share", "decoded_share", "noticed_share", "whole_share")
                ),
                f"{np.median([one['seconds'] for one in found]):.1f}",
                f"{np.median([one['sent_bytes'] / one['bytes'] for one in found]):.4f}x",
            )
    return table


def _trainer(found: _Row, settings: _Row) -> Table:
    table = _table(
        f"A thread that computes beside the publisher ({settings['threads']} coding threads), no followers; "
        f"{1 / found['quiet_slice_s']:.0f} slices/s when nothing is published",
        *(
            "publication",
            "publish() took",
            "slices/s",
            "held up",
            "waiting for a core",
            "for the GIL",
            "longest slice",
            "event loop late",
        ),
    )
    for row in found["publications"]:
        table.add_row(
            row["kind"],
            f"{row['seconds']:.2f} s",
            f"{row['slices'] / row['seconds']:.0f}",
            *(f"{row[key]:.2f} s" for key in ("held_s", "queued_s", "blocked_s")),
            *(f"{row[key] * 1e3:.0f} ms" for key in ("longest_slice_s", "loop_late_s")),
        )
    return table
