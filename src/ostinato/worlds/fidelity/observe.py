"""Collects observations of machines: runs the observing script in a sandbox, and reads files of observations."""

from __future__ import annotations

from pathlib import Path

from ostinato.core.errors import BadRequest, NotFound, Unavailable
from ostinato.core.lines import lines_of
from ostinato.core.seams import Sandbox
from ostinato.worlds.fidelity import look
from ostinato.worlds.fidelity.observation import Observation, parse_observation

PATIENCE_S = 60.0


def script() -> str:
    """Return the source of the observing script, `look.py`."""
    return Path(look.__file__).read_text(encoding="utf-8")


async def observe(sandbox: Sandbox, group: str, *, python: str = "python3") -> Observation:
    """Run the observing script in a sandbox. Raises Unavailable if it does not run there."""
    done = await sandbox.exec((python, "-s", "-c", script(), group), timeout=PATIENCE_S)
    try:
        return parse_observation(done.stdout.decode().strip().splitlines()[-1])
    except (IndexError, UnicodeDecodeError, BadRequest) as error:
        stderr = done.stderr.decode(errors="replace")[-300:].strip()
        raise Unavailable(
            f"the sandbox cannot be observed: {python} ended with {done.code} ({done.killed_reason or stderr}); put {python} into it"
        ) from error


def read_observations(path: Path) -> tuple[Observation, ...]:
    """Read a file with one observation per line. Raises NotFound, or BadRequest with the number of a malformed line."""
    try:
        lines = lines_of(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}; `ostinato worlds observe --help` shows how to make one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from error
    observations: list[Observation] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                observations.append(parse_observation(line))
            except BadRequest as error:
                raise BadRequest(f"{path}, line {number}: {error}") from error
    return tuple(observations)
