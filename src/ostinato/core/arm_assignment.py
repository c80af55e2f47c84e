"""Assigns people to the arms of a trial, or to the holdout whose feedback is never learned from. Pure.

Also decides which answers a person's dials could affect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from ostinato.core.records import Arm, Pick, Purpose, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How a trial divides its users: shares of them get the canary or stay on the previous release; the others get live.

    Users on the control arm do not take part, nor do those who stay on the verified release: a share `verified` of the users who are not
    on control, drawn with its own salt. Each trial has its own salt, so that new releases are not always tried on the same users.
    A share that grows keeps its users.

    Example: ``Dealing(salt="9f2c41", canary=0.05)``
    """

    salt: str
    canary: float = 0.0
    previous: float = 0.0
    verified: float = 0.0
    verified_salt: str = ""


ANONYMOUS = "anonymous"
"""The user of calls that name none: many people under one name."""
BRANCHES = "branch/"
"""Prefix of the refs and slots of tenants' branches."""
BRANCH_REFS = "branches/"
"""Prefix of the other refs and slots of branches that are trained."""


def branch_of(tenant: str) -> str:
    """Return the ref, and engine slot, of the version that answers only one tenant's calls. The run that trains it publishes under it, too.

    Example: ``branch_of("acme") == "branch/acme"``
    """
    return BRANCHES + tenant


def branch_ref(tenant: str, ref: str) -> str:
    """Return the shared store's name of a ref of the run that trains a tenant's branch; its control is the shared live version.

    Example: ``branch_ref("acme", "candidate") == "branches/acme/candidate"``, ``branch_ref("acme", "live") == "branch/acme"``
    """
    return {"live": branch_of(tenant), "control": "live"}.get(ref, f"{BRANCH_REFS}{tenant}/{ref}")


def dealing_key(salt: str) -> bytes:
    """Return the key for `place_of` that belongs to a salt. Places under two salts are independent."""
    return blake2b(salt.encode(), digest_size=32).digest()


def place_of(key: bytes, tenant: str, user: str) -> float:
    """Return a person's place in [0, 1), a keyed hash. People below a share belong to it, and stay in it if it grows.

    Example: ``place_of(dealing_key("gold"), "default", "ann") < 0.1``
    """
    name = tenant.encode()
    digest = blake2b(len(name).to_bytes(4, "big") + name + user.encode(), key=key, digest_size=7).digest()
    # 53 bits are exact in a float, so the place is never 1.0
    return (int.from_bytes(digest, "big") >> 3) / 2.0**53


_HOLDOUT_KEY = dealing_key("adapt holdout")


def holdout_place(person: tuple[str, str]) -> float:
    """Return a person's place in [0, 1) for the permanent holdout of dials: below `adapt.holdout` their answers are never steered.

    Example: ``holdout_place(("acme", "ann")) < config.holdout``
    """
    return place_of(_HOLDOUT_KEY, *person)


_STEERABLE = (Purpose.TASK, Purpose.SUBAGENT)
_UNSTEERED = (Arm.CONTROL, Arm.OUTSIDE)


def could_lean(turn: Turn, bases: Container[str]) -> bool:
    """Return True if dials could affect answers of this kind, on this arm, by a version with a basis (`bases`: the versions' hashes).

    The holdout's answers count, too, so that both sides differ only in their dials (intention to treat).

    Example: ``could_lean(turn, {turn.versions[0].hash})`` is False for a turn on the control arm
    """
    asked = turn.purpose in _STEERABLE and not turn.sampling.grammar and turn.user != ANONYMOUS
    served = turn.arm.people and turn.arm not in _UNSTEERED
    return asked and served and any(version.hash in bases for version in turn.versions)


class EpisodePicks:
    """The draws of the newest `most` episodes, over all tenants. Beyond that the oldest draw of the tenant with most is evicted, so that
    no tenant can evict another's.

    Example: ``picks.put("acme", "e1", pick); picks.get("acme", "e1") == pick``
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._picks: dict[str, OrderedDict[str, Pick]] = {}  # by tenant and episode

    def get(self, tenant: str, episode: str) -> Pick | None:
        """Return an episode's draw, if it is remembered."""
        return self._picks.get(tenant, {}).get(episode)

    def put(self, tenant: str, episode: str, pick: Pick) -> None:
        """Remember a draw; the episode becomes the tenant's newest."""
        theirs = self._picks.setdefault(tenant, OrderedDict())
        self._size += episode not in theirs
        theirs[episode] = pick
        theirs.move_to_end(episode)
        if self._size > self._most:
            max(self._picks.values(), key=len).popitem(last=False)
            self._size -= 1

    def __iter__(self) -> Iterator[tuple[str, str, Pick]]:
        """Yield tenants, episodes and draws, each tenant's oldest first."""
        return ((tenant, episode, pick) for tenant, theirs in self._picks.items() for episode, pick in theirs.items())
