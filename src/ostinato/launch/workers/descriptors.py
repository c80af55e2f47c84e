"""How many files and connections a process may have open."""

from __future__ import annotations

import contextlib
import resource

_MOST = 65_536  # some systems set no limit, but open files take memory all the same
_SHARE = 0.8  # the rest is for the log, the weights and whatever the engine opens


def room_for_connections() -> int:
    """Raise this process's limit of open files as far as allowed; returns how many of them can be connections."""
    soft, hard = (_MOST if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    wanted = min(hard, _MOST)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems report no limit but have one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _limits()[1]))
            soft = wanted
    return int(min(soft, _MOST) * _SHARE)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
