"""Runs one part of the examination and prints its cases, one JSON line each: `python -m tests.examinations.weight_faults PART DIR`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path

from tests.examinations.weight_faults import damage, kills, network, races, weather
from tests.examinations.weight_faults.outcome import Case

PARTS: dict[str, Callable[..., Generator[Case]]] = {
    "publisher-kills": kills.publisher,
    "follower-kills": kills.follower,
    "damage": damage.examine,
    "races": races.examine,
    "transient": weather.transient,
    "full-disk": weather.full_disk,
    "clocks": weather.clocks,
    "network": network.examine,
}


def main() -> None:
    """Run the part that the command line names, and print its cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--wide", action="store_true", help="every place, not a choice of them")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    args.directory.mkdir(parents=True, exist_ok=True)
    for case in PARTS[args.part](args.directory.resolve(), wide=args.wide):
        sys.stdout.write(json.dumps(asdict(case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
