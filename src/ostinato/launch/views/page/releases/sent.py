"""The deltas published between two versions, from their manifests; no weights are read."""

from __future__ import annotations

from collections import defaultdict

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.records import PolicyVersion
from ostinato.web.page.releases.evidence import LayerChange, WeightChange
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.compare import Change
from ostinato.weights.version.manifest import Manifest

MOST_VERSIONS = 32
"""Manifests read for one answer, at most."""


async def sent_between(manifests: Manifests, since: PolicyVersion, policy: PolicyVersion) -> WeightChange | None:
    """The deltas that lead from one version to the other; None if the manifests do not connect them within `MOST_VERSIONS`."""
    try:
        chain = await _chain(manifests, since, policy)
    except (NotFound, Corrupt):
        return None
    if not chain:
        return None
    whole = any(manifest.kind == "full" for manifest in chain)
    return WeightChange(
        since=since,
        versions=len(chain),
        bytes=sum(manifest.payload_bytes for manifest in chain),
        full_bytes=chain[0].full_bytes,
        layers=() if whole else _layers(chain),
    )


async def _chain(manifests: Manifests, since: PolicyVersion, policy: PolicyVersion) -> list[Manifest]:
    found: list[Manifest] = []
    _, manifest = await manifests.at(policy.hash)
    while manifest.root != since.hash:
        if manifest.parent is None or manifest.number <= since.number or len(found) == MOST_VERSIONS:
            return []
        found.append(manifest)
        _, manifest = await manifests.at(manifest.parent)
    return found


def _layers(chain: list[Manifest]) -> tuple[LayerChange, ...]:
    took: defaultdict[str, int] = defaultdict(int)
    for manifest in chain:
        for tensor in manifest.tensors:
            took[tensor.name] += sum(chunk.length for chunk in tensor.chunks)
    found: list[LayerChange] = []
    for tensor in chain[0].tensors:
        place = Change(name=tensor.name, elements=tensor.nbytes, changed=took[tensor.name], moved=None)
        found.append(LayerChange(kind=place.kind, layer=place.layer, share=min(1.0, place.share)))
    return tuple(found)
