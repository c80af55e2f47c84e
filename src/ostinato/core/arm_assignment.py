"""Assigns people to the arms of a trial, or to the group whose feedback is never learned from. Pure.

Also says which answers a person's dials could move.
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

    Users on the control arm take no part, nor do those who stay on the verified release: a share `verified` of the users who are not
    on control, drawn with a salt of its own. Each trial has its own salt, so that new releases are not always tried on the same users.
    A share that grows keeps the users it has.

    Example: ``Dealing(salt="9f2c41", canary=0.05)``
    """

    salt: str
    canary: float = 0.0
    previous: float = 0.0
    verified: float = 0.0
    verified_salt: str = ""


ANONYMOUS = "anonymous"
"""The user of calls that name none: many people behind one name."""
BRANCHES = "branch/"
"""What the refs and slots of tenants' branches begin with."""
BRANCH_REFS = "branches/"
"""What the other refs and slots of branches that are trained begin with."""


def branch_of(tenant: str) -> str:
    """The ref, and the engine's slot, of the version that answers one tenant's calls alone. The run that trains it publishes under it, too.

    Example: ``branch_of("acme") == "branch/acme"``
    """
    return BRANCHES + tenant


def branch_ref(tenant: str, ref: str) -> str:
    """The shared store's name of a ref of the run that trains a tenant's branch; its control is the shared live version.

    Example: ``branch_ref("acme", "candidate") == "branches/acme/candidate"``, ``branch_ref("acme", "live") == "branch/acme"``
    """
    return {"live": branch_of(tenant), "control": "live"}.get(ref, f"{BRANCH_REFS}{tenant}/{ref}")


def dealing_key(salt: str) -> bytes:
    """The key for `place_of` that belongs to a salt. Places under two salts are unrelated."""
    return blake2b(salt.encode(), digest_size=32).digest()


def place_of(key: bytes, tenant: str, user: str) -> float:
    """A person's place in [0, 1), always the same under the same key. A person below a share belongs to it, and stays in it if it grows.

    Example: ``place_of(dealing_key("gold"), "default", "ann") < 0.1``
    """
    name = tenant.encode()
    digest = blake2b(len(name).to_bytes(4, "big") + name + user.encode(), key=key, digest_size=7).digest()
    # 53 bits: exact in a float, so never 1.0
    return (int.from_bytes(digest, "big") >> 3) / 2.0**53


_DIALS = dealing_key("adapt holdout")


def holdout_place(person: tuple[str, str]) -> float:
    """A person's place in [0, 1) for the standing holdout of dials: below `adapt.holdout` their answers never lean.

    Example: ``holdout_place(("acme", "ann")) < config.holdout``
    """
    return place_of(_DIALS, *person)


_STEERABLE = (Purpose.TASK, Purpose.SUBAGENT)
_UNSTEERED = (Arm.CONTROL, Arm.OUTSIDE)


def could_lean(turn: Turn, bases: Container[str]) -> bool:
    """Whether dials could move answers of this kind, on this arm, by one of the versions with a basis (`bases`: their hashes).

    The holdout's answers count, too, so that both sides are alike but for their dials (by intention to treat).

    Example: ``could_lean(turn, {turn.versions[0].hash})`` is False for a turn on the control arm
    """
    asked = turn.purpose in _STEERABLE and not turn.sampling.grammar and turn.user != ANONYMOUS
    served = turn.arm.people and turn.arm not in _UNSTEERED
    return asked and served and any(version.hash in bases for version in turn.versions)


class EpisodePicks:
    """The draws of the newest `most` episodes, of all tenants together. Of too many the oldest of the tenant that has most is dropped, so
    that nobody can drive another's out.

    Example: ``picks.put("acme", "e1", pick); picks.get("acme", "e1") == pick``
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._picks: dict[str, OrderedDict[str, Pick]] = {}  # by tenant and episode

    def get(self, tenant: str, episode: str) -> Pick | None:
        """An episode's draw, if it is remembered."""
        return self._picks.get(tenant, {}).get(episode)

    def put(self, tenant: str, episode: str, pick: Pick) -> None:
        """Remember a draw; the episode is then the tenant's newest."""
        theirs = self._picks.setdefault(tenant, OrderedDict())
        self._held += episode not in theirs
        theirs[episode] = pick
        theirs.move_to_end(episode)
        if self._held > self._most:
            max(self._picks.values(), key=len).popitem(last=False)
            self._held -= 1

    def __iter__(self) -> Iterator[tuple[str, str, Pick]]:
        """Tenants, episodes and draws, each tenant's oldest first."""
        return ((tenant, episode, pick) for tenant, theirs in self._picks.items() for episode, pick in theirs.items())
