"""A process that appends to a log in Postgres, and stops itself once the server has all of its first commit but the COMMIT."""

import asyncio
import signal
import sys
import threading
from dataclasses import replace

from tests.contract.test_log import SIGNAL

from ostinato.core.errors import Unavailable
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.segment import PostgresSegment


class _Stopping:
    """A connection that stops the process before COMMIT, and sends it once the process is continued."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, *rest, **options):
        if statement == "COMMIT":
            self._connection.pgconn.flush()
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # sent to this thread, so that it stops here
        return self._connection.execute(statement, *rest, **options)


async def main() -> None:
    """``CONFIG NAME``: appends one row, and retries until it is stored."""
    config, name = sys.argv[1:]
    commit, commits = PostgresSegment.commit, []

    def stop_in_the_first(segment):
        commits.append(segment)
        if len(commits) == 1:
            segment.connection = _Stopping(segment.connection)
        commit(segment)

    PostgresSegment.commit = stop_in_the_first
    with PostgresLog.open(RecordConfig.model_validate_json(config)) as log:
        while True:
            try:
                await log.append(replace(SIGNAL, id=name))
            except Unavailable:
                continue
            return


if __name__ == "__main__":
    asyncio.run(main())
