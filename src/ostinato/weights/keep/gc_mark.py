"""The marking phase of garbage collection: from the refs and their manifests to every hash that must be kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ostinato.core.records import PolicyVersion
from ostinato.weights.keep.pins import LEASES
from ostinato.weights.store.interface import ListedRef
from ostinato.weights.version.content import VERSIONS
from ostinato.weights.version.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Node:
    """The facts about a manifest that marking needs. `parent` is None if no ancestor is needed (no links)."""

    policy: PolicyVersion
    parent: str | None
    routes: tuple[str, ...]
    objects: frozenset[str]

    @classmethod
    def of(cls, manifest: Manifest) -> Node:
        """The node of a manifest."""
        routes = tuple(route.manifest for route in manifest.routes)
        parent = manifest.parent if manifest.links else None
        return cls(manifest.policy, parent, routes, frozenset(manifest.objects()))


@dataclass(frozen=True, slots=True)
class Rules:
    """What is kept in addition to the versions that refs name: the `newest` versions, and everything younger than `grace_s` seconds.

    A lease counts for `lease_s` seconds; `roots` are kept if they are in the store.
    """

    newest: int
    grace_s: float
    lease_s: float
    roots: tuple[str, ...] = ()


@dataclass(slots=True)
class Starts:
    """The manifests that marking starts from, each with the reasons why, and the requested roots that are not in the store."""

    reasons: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    missing: list[str] = field(default_factory=list[str])

    def add(self, manifest: str, reason: str) -> None:
        """Add a reason to keep a manifest."""
        self.reasons.setdefault(manifest, []).append(reason)


def versions_of(refs: Mapping[str, ListedRef]) -> dict[str, str]:
    """Root -> hash of its manifest, from the refs that name versions."""
    return {ref.removeprefix(VERSIONS): at.value for ref, at in refs.items() if ref.startswith(VERSIONS)}


def starts(
    refs: Mapping[str, ListedRef], versions: Mapping[str, str], numbers: Mapping[str, int], rules: Rules
) -> Starts:
    """Where marking starts: named refs, unexpired leases, the newest versions, young versions, and the roots that the rules name.

    `versions` maps roots to manifests, `numbers` manifests to version numbers.

    Example: ``starts(refs, versions, numbers, rules).reasons == {"5c1e...": ["live", "newest 20"]}``
    """
    found = Starts()
    for ref, at in refs.items():
        if ref.startswith(VERSIONS):
            if at.age_s < rules.grace_s:
                found.add(at.value, "young")
        elif not ref.startswith(LEASES) or at.age_s <= rules.lease_s:
            found.add(versions.get(at.value, at.value), ref)
    for manifest in sorted(numbers, key=lambda hash: (-numbers[hash], hash))[: rules.newest]:
        found.add(manifest, f"newest {rules.newest}")
    for root in rules.roots:
        if root in versions:
            found.add(versions[root], "released")
        else:
            found.missing.append(root)
    return found


def marked(nodes: Mapping[str, Node], manifests: Iterable[str]) -> set[str]:
    """Every hash of a manifest or object that these manifests need.

    A manifest needs itself, its routes and its ancestors back to the first with a full snapshot, with all their objects. It does not need
    the bases of routes. `nodes` must hold all these manifests.
    """
    seen: set[str] = set()
    found: set[str] = set()
    for start in manifests:
        at: str | None = start
        while at is not None and at not in seen:
            seen.add(at)
            for hash in (at, *nodes[at].routes):
                found.add(hash)
                found |= nodes[hash].objects
            at = nodes[at].parent
    return found


def expired(refs: Mapping[str, ListedRef], rules: Rules) -> list[str]:
    """The leases that have expired and are old enough to be deleted."""
    limit = max(rules.lease_s, rules.grace_s)
    return [ref for ref, at in refs.items() if ref.startswith(LEASES) and at.age_s > limit]
