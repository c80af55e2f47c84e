"""A process that holds a role of a run until it is killed, or until it finds that another process holds it."""

import sys
import time
from pathlib import Path

from ostinato.core.errors import LeaseLost
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.leases import PostgresRoles
from ostinato.record.roles import FileRoles


def roles_of(place: str):
    """The roles of a run's directory, or of the log that a `RecordConfig` as JSON names."""
    return PostgresRoles(RecordConfig.model_validate_json(place)) if place.startswith("{") else FileRoles(Path(place))


def main() -> None:
    """``PLACE ROLE``: prints ``held``, and ``lost`` once the role is lost."""
    place, role = sys.argv[1:]
    tenure = roles_of(place).take(role)
    print("held", flush=True)  # noqa: T201
    while not tenure.lost:
        time.sleep(0.02)
    try:
        tenure.check()
    except LeaseLost:
        print("lost", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
