"""Turns the evidence into figures and checks them, with a line for each violated requirement."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.examinations.hosts.storm import Event

Lines = Sequence[Mapping[str, Any]]
_GRACE_S = 6.0
"""Seconds after a cut in which requests may still fail because of it: `record.append_s`, and a retransmission of TCP."""


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file, one per line. Incomplete and invalid lines are skipped."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All records: those of the users and followers, the workers' progress files, and the results of `audit.py`."""

    grounds: Mapping[str, bool]
    facts: Mapping[str, Any]
    users: Lines
    followers: Mapping[str, Lines]
    gateways: Mapping[str, Lines]
    trainers: Mapping[str, Lines]
    crews: Mapping[str, Lines]
    alive: bool
    events: Sequence[Event]
    wire: Mapping[str, int]
    users_status: int


def judge(seen: Evidence, *, learns: bool = True) -> dict[str, Any]:
    """The figures, and under `problems` the violated requirements. `learns`: live's users must accept more than control's at the end."""
    found = {
        "grounds": dict(seen.grounds),
        "wire": dict(seen.wire),
        **kept(seen),
        **learned(seen),
        **released(seen),
        **followed(seen),
        "requests": requests(seen),
        "acceptance": seen.facts["acceptance"],
        "restarts": {name: restarts(said) for name, said in seen.crews.items()},
    }
    problems = [f"the lab is none: {name}" for name, true in seen.grounds.items() if not true]
    for part in ("losses", "batches", "releases"):
        problems += [f"{what}: {count}" for what, count in found[part]["wrong"].items() if count]
    if not seen.facts["balanced"]:
        problems.append(f"the turns do not add up: {seen.facts['account']['contradictions'][:3]}")
    if not _shipped(seen.facts["releases"]):
        problems.append("nothing was released")
    if learns and seen.facts["acceptance"]["last third"]["live minus control"]["lower"] <= 0:
        problems.append("in the last third live is not accepted more than control")
    if not found["followers"]["one root and the same bytes"]:
        problems.append("the followers are not at one root with the same bytes")
    if found["followers"]["unsound"]:
        problems.append(f"{found['followers']['unsound']} versions were handed out that do not fit their root")
    problems += [
        f"failed without a cause: {count} {what}" for what, count in found["requests"]["without a cause"].items()
    ]
    if not seen.alive:
        problems.append("a supervisor ended")
    if seen.users_status:
        problems.append(f"the users ended with status {seen.users_status}")
    return found | {"problems": problems}


def kept(seen: Evidence) -> dict[str, Any]:
    """Compare acknowledged turns and signals with the log."""
    turns, signals = seen.facts["turns"], seen.facts["signals"]
    told = {line["turn"]: line["text"] for line in seen.users if line["kind"] == "call" and "turn" in line}
    taken = {
        line["id"] for line in seen.users if line["kind"] == "signal" and "taken" in (*line["ends"], line["again"])
    }
    stored = {name.partition("/")[2]: count for name, count in signals.items()}
    episodes = Counter(turn["episode"] for turn in turns.values())
    keys = {line["key"] for line in seen.users if line["kind"] == "call"}
    arms: dict[str, set[str]] = defaultdict(set)
    for turn in turns.values():
        if turn["user"].startswith("sim-"):
            arms[turn["user"]].add("control" if turn["arm"] == "control" else "live")
    versions = set(seen.facts["versions"])
    wrong = {
        "acknowledged turns lost": sum(turn not in turns for turn in told),
        "turns with another text": sum(turns[turn]["text"] != text for turn, text in told.items() if turn in turns),
        "turns doubled": seen.facts["doubled turns"],
        "calls that were answered twice": sum(
            1 for line in seen.users if line["kind"] == "call" and _finished(turns, line["key"]) > 1
        ),
        "acknowledged signals lost": sum(name not in stored for name in taken),
        "signals doubled": sum(count - 1 for count in stored.values()),
        "rows out of order": seen.facts["rows out of order"],
        "users who changed between live and control": sum(len(found) > 1 for found in arms.values()),
        "turns by weights that nobody published": sum(bool(set(turn["roots"]) - versions) for turn in turns.values()),
    }
    calls = [line for line in seen.users if line["kind"] == "call"]
    said = [line for line in seen.users if line["kind"] == "signal"]
    return {
        "acknowledged": {"turns": len(told), "signals": len(taken)},
        "asked": {
            "calls": len(calls),
            "given up": sum(line["outcome"] == "given up" for line in calls),
            "signals given up": sum("taken" not in line["ends"] for line in said),
            "signals sent again after they were taken": sum(line["again"] == "taken" for line in said),
        },
        "log": {
            "turns": len(turns),
            "signals": len(stored),
            "turns of one call, more than one": sum(episodes[key] > 1 for key in keys),
        },
        "losses": {"wrong": wrong},
        "account": seen.facts["account"],
        "balanced": seen.facts["balanced"],
    }


def _finished(turns: Mapping[str, Any], key: str) -> int:
    return sum(turn["episode"] == key and turn["finish"] in ("stop", "length") for turn in turns.values())


def learned(seen: Evidence) -> dict[str, Any]:
    """Check the batches: each step once, in order, complete, no turn in two batches. Also counts steps by trainer."""
    batches = seen.facts["batches"]
    taught = [turn for batch in batches for turn in batch["turns"]]
    numbers = [batch["step"] for batch in batches]
    cut = next((event for event in seen.events if event.name.startswith("trainer")), None)
    wrong = {
        "batches missing, doubled or out of order": int(numbers != list(range(1, len(numbers) + 1))),
        "batches torn": sum(batch["torn"] for batch in batches),
        "turns in two batches": len(taught) - len(set(taught)),
        "turns in a batch that are not in the log": sum(turn not in seen.facts["turns"] for turn in taught),
        "no step was taken": int(not batches),
        "no step after the trainer was cut off": int(
            cut is not None and not any(batch["at"] > cut.began + 5 for batch in batches)
        ),
    }
    after = [batch["at"] for batch in batches if cut is not None and batch["at"] > cut.began]
    before = [batch["at"] for batch in batches if cut is not None and batch["at"] <= cut.began]
    return {
        "batches": {
            "steps": len(batches),
            "by trainer": {name: len({line["step"] for line in said if line["kind"] == "step"}) for name, said in seen.trainers.items()},
            "longest pause around the cut s": round(min(after) - max(before), 1) if after and before else None,
            "wrong": wrong,
        }
    }  # fmt: skip


def released(seen: Evidence) -> dict[str, Any]:
    """Check the ledger: each version is shipped at most once, and the release is rolled back by hand once."""
    events = seen.facts["releases"]
    count = Counter((event["action"], event["hash"]) for event in events if not event["actor"])
    by_hand = [event for event in events if event["actor"]]
    wrong = {
        "releases shipped twice": sum(number > 1 for (action, _), number in count.items() if action == "shipped"),
        "releases blocked twice": sum(number > 1 for (action, _), number in count.items() if action == "blocked"),
        "shipped and blocked": sum(count["blocked", root] > 0 for action, root in count if action == "shipped"),
        "rolled back by hand other than once": int(
            [event["action"] for event in by_hand] != ["rolled_back"] * (1 if _shipped(events) else 0)
        ),
        "shipped without a verdict": sum(count["evaluated", event["hash"]] == 0 for event in _shipped(events)),
    }
    actions = Counter(event["action"] for event in events)
    return {"releases": {"actions": dict(actions), "by hand": len(by_hand), "wrong": wrong}}


def _shipped(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["action"] == "shipped" and event["previous"] is not None]


def followed(seen: Evidence) -> dict[str, Any]:
    """The lag of each follower, and the versions at which they ended."""
    moves = [
        (event["at"], event["hash"])
        for event in seen.facts["releases"]
        if event["action"] in ("shipped", "rolled_back")
    ]
    lags: dict[str, list[float]] = defaultdict(list)
    have = {
        name: [(line["at"], line["hash"]) for line in said if line["kind"] == "have" and line["ref"] == "live"]
        for name, said in seen.followers.items()
    } | {
        name: [(line["at"], line["hash"]) for line in said if line["kind"] == "swapped" and line["slot"] == "live"]
        for name, said in seen.gateways.items()
    }
    for at, (moved, root) in enumerate(moves[1:], 1):
        until = moves[at + 1][0] if at + 1 < len(moves) else float("inf")
        for name, got in have.items():
            first = next((when for when, what in got if what == root and when >= moved - 1), None)
            if first is not None and first < until + 30:
                lags[name].append(round(first - moved, 2))
    ends = [
        [line for line in said if line["kind"] == "have" and line["ref"] == "live"][-1:]
        for said in seen.followers.values()
    ]
    last = {(line["hash"], line["bytes"]) for found in ends for line in found}
    live = seen.facts["refs"]["live"]
    unsound = sum(line["kind"] == "have" and not line["sound"] for said in seen.followers.values() for line in said)
    return {
        "followers": {
            "root": live,
            "one root and the same bytes": len(last) == 1 and all(ends) and all(root == live for root, _ in last)
            and all(served.get("live") == live for served in seen.facts["slots"]),
            "versions taken": {name: len(got) for name, got in have.items()},
            "unsound": unsound,
            "seconds behind a release, median and most": {
                name: [sorted(found)[len(found) // 2], max(found)] for name, found in lags.items() if found
            },
            "caught up after s": recoveries(seen, have),
        }
    }  # fmt: skip


def recoveries(seen: Evidence, have: Mapping[str, Sequence[tuple[float, str]]]) -> dict[str, Any]:
    """The seconds from each event until its victim recovered: a follower reached the store, a gateway answered, a step was taken."""
    found: dict[str, Any] = {}
    for event in seen.events:
        name = event.name.split()[0].removesuffix("'s")
        if name in seen.followers:
            looks = [
                line["at"]
                for line in seen.followers[name]
                if line["kind"] in ("looked", "have") and line["at"] > event.ended
            ]
            found[f"{event.name}: looks again"] = _since(event.ended, looks)
            found[f"{event.name}: has a newer version"] = _since(event.ended, [at for at, _ in have[name]])
        elif name in have:
            number = int(name[-1])
            answers = [each["at"] + each["s"] for line in seen.users if line["kind"] == "call" for each in line["tries"]
                       if each["gateway"] == number and each["end"] == "answered" and each["at"] > event.began]  # fmt: skip
            found[f"{event.name}: answers again"] = _since(event.ended, answers)
        elif name == "Postgres":
            found[f"{event.name}: a turn is acknowledged"] = _since(
                event.ended, [line["at"] for line in seen.users if "turn" in line]
            )
        elif name == "release":
            moves = [each["at"] for each in seen.facts["releases"] if not each["actor"]]
            found[f"{event.name}: judges again"] = _since(event.ended, moves)
        elif name.startswith("trainer"):
            steps = [batch["at"] for batch in seen.facts["batches"]]
            found[f"{event.name}: a step since it began"] = _since(event.began, steps)
    return found


def latencies(seen: Evidence) -> dict[str, list[float]]:
    """Latencies of answered tries before the first event (fast links), and afterwards while nothing was cut or down."""
    tries = [each for line in seen.users for each in line.get("tries", ()) if each["end"] == "answered"]
    if not tries or not seen.events:
        return {}
    slow = seen.events[0].ended
    calm = [each for each in tries if each["at"] > slow and not any(event.began - 2 < each["at"] + each["s"]
            and each["at"] < event.ended + _GRACE_S for event in seen.events[1:])]  # fmt: skip
    found = {
        "quick links": [each["s"] for each in tries if each["at"] + each["s"] < slow],
        "slow links": [each["s"] for each in calm],
    }
    return {name: [round(median(times), 2), max(times)] for name, times in found.items() if times}


def _since(moment: float, times: Iterable[float]) -> float | None:
    return min((round(at - moment, 2) for at in times if at > moment), default=None)


def requests(seen: Evidence) -> dict[str, Any]:
    """Failed tries by the events that explain them; `without a cause` counts those that no event explains."""
    back = {event.name: _back(seen, event) for event in seen.events}
    by_event: dict[str, Counter[str]] = defaultdict(Counter)
    causeless: Counter[str] = Counter()
    tries = 0
    for line in seen.users:
        for each in line.get("tries", ()):
            tries += 1
            if each["end"] == "answered":
                continue
            what = f"gateway-{each['gateway']}: {each['end']}"
            causes = [event for event in seen.events if _explains(event, each, back)]
            for event in causes:
                by_event[event.name][what] += 1
            if not causes:
                causeless[what] += 1
    return {
        "tries": tries,
        "failed while": {name: dict(count) for name, count in by_event.items()},
        "without a cause": dict(causeless),
        "seconds of an answer, median and most": latencies(seen),
        "feedback, ends of tries": dict(
            Counter(end for line in seen.users if line["kind"] == "signal" for end in line["ends"])
        ),
    }


def _explains(event: Event, tried: Mapping[str, Any], back: Mapping[str, float]) -> bool:
    """Whether an event may explain a failed try: it overlapped the try or had just ended, and concerns this gateway or Postgres."""
    name = f"gateway-{tried['gateway']}"
    if not event.name.startswith((name, "Postgres")):
        return False
    return tried["at"] <= back[event.name] and tried["at"] + tried["s"] >= event.began


def _back(seen: Evidence, event: Event) -> float:
    """The time from which the event no longer explains failures. A restarted gateway must first load its model."""
    swaps = [line["at"] for line in seen.gateways.get(event.name.split("'")[0], ()) if line["at"] > event.ended]
    return max([event.ended + _GRACE_S, *swaps[:1]]) if "power" in event.name else event.ended + _GRACE_S


def restarts(said: Lines) -> dict[str, int]:
    """The number of restarts by worker and reason, shortened."""
    return dict(Counter(f"{line['worker']}: {line['what'][:120]}" for line in said if "again" in line.get("what", "")))
