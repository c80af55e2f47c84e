"""Capacity planning: estimates a deployment's sizes, requests, storage and transfer times from a few inputs. Pure arithmetic.

The size of a delta follows from the share p of elements that change. Encoding which of n elements changed takes n H(p) bits if all are
equally likely (H is the binary entropy). Knowing the old values saves bits, and each changed element costs a bit or two more. On real pairs
of versions the two nearly cancel, so a delta has `factor * n * H(p)` bits with a factor near 1: see `FACTORS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ostinato.core.errors import BadRequest
from ostinato.weights.version.content import CHUNK_ELEMENTS
from ostinato.weights.version.manifest import MAX_MANIFEST_BYTES

FACTORS: Final = {"settled": 0.73, "planned": 1.0, "at random": 1.16, "first step": 1.54}
"""Bits of a delta divided by n H(p). Measured on SmolLM2-135M: steps 27 and later at a learning rate of 1e-6 (0.71 to 0.75; 0.91 over 4 and
16 of them), two steps of a live run at 2e-5 (0.97), elements drawn at random (1.15 and 1.16), the first step of a run (1.54)."""

DENSEST: Final = 0.25
"""Above this share of changed elements another codec takes over. Its payload is assumed to be as large as a full snapshot's."""

MANIFEST_BYTES: Final = (362, 76)
"""Bytes of a manifest per chunk, plain and compressed, as in a full snapshot of 285 chunks in 272 tensors."""

SKIPS: Final = (16, 4, 1)
"""Number of versions that a delta spans, the longest first."""

SNAPSHOT: Final = 0.69
"""Size of a full snapshot as a share of the weights' bytes; measured on SmolLM2-135M in bf16."""

_REF_WRITES = 3  # per publication: two refs, and one listing for a new ref
_REF_READS = 7  # per publication: before each step
_FOLLOWER_REF_READS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is published, and how. `changed`: the share of elements that differ between a version and its predecessor.

    `growth`: how changes accumulate; over k versions the share is `changed * k**growth`. Measured: 0.72 over 15 steps at 1e-5, 0.38 over
    16 at 1e-6. `snapshot`: the size of a full snapshot as a share of the weights' bytes. Each shard publishes its part as a separate chain.

    Example: ``Deployment(parameters=1e12, changed=0.01, shards=16)``. Raises BadRequest for values out of range (also `Link`, `Cores`).
    """

    parameters: float
    changed: float
    shards: int = 1
    factor: float = FACTORS["planned"]
    growth: float = 0.72
    snapshot: float = SNAPSHOT
    anchor_every: int = 25
    anchor_share: float = 0.4
    object_bytes: int = 1 << 26
    part_bytes: int = 1 << 23
    max_bytes: int = 1 << 38
    keep: int = 100

    def __post_init__(self) -> None:
        _check("parameters", self.parameters, 1, 1e18)
        _check("shards", self.shards, 1, 1 << 20)
        _check("changed", self.changed, 1e-9, DENSEST)
        _check("keep", self.keep, 1, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network link. `gbit_s`: 10^9 bits per second; `rtt_s`: round-trip time; `window`: most bytes in flight per stream.

    Connections are assumed to be open, past slow start, and free of packet loss, whose cost depends on the congestion control and is not
    modelled. 6 MiB is the largest receive window that Linux gives by default.
    """

    gbit_s: float = 10.0
    rtt_s: float = 0.15
    streams: int = 16
    window: int = 6 << 20

    def __post_init__(self) -> None:
        _check("gbit_s", self.gbit_s, 1e-6, 1e6)
        _check("rtt_s", self.rtt_s, 1e-6, 3600)
        _check("streams", self.streams, 1, 1 << 20)

    @property
    def product(self) -> float:
        """Bytes in flight when the link is full (the bandwidth-delay product)."""
        return self.gbit_s * 1e9 / 8 * self.rtt_s

    @property
    def bytes_s(self) -> float:
        """Throughput of all streams together: the link's, or less if their windows add up to less than `product`."""
        return min(self.gbit_s * 1e9 / 8, self.streams * self.window / self.rtt_s)

    def seconds(self, size: float, requests: int) -> float:
        """Return the time for `size` bytes in `requests` requests, `streams` at a time, each of which waits for one round trip."""
        return math.ceil(requests / self.streams) * self.rtt_s + size / self.bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Cores per shard, and the throughput of one core in GB of full weights a second (10^9 bytes).

    The rates are those of one busy Zen 5 core: deltas of uniformly drawn changes of 1% (2.6 and 5.0; at 2.3% 2.0 and 2.8), full
    snapshots, BLAKE3. Linear scaling with the number of cores is assumed.
    """

    count: int = 16
    encode: float = 2.6
    decode: float = 5.0
    encode_full: float = 0.42
    decode_full: float = 1.3
    hash: float = 4.5

    def __post_init__(self) -> None:
        _check("cores", self.count, 1, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The cost of publishing or fetching: payload bytes, objects, requests by price class, seconds on the link and on the cores.

    `puts`: writes with their parts, and listings; `gets`: reads and HEADs. All shards share the link; each has its own cores.
    """

    bytes: float
    objects: int
    puts: int
    gets: int
    line_s: float
    cores_s: float

    @property
    def seconds(self) -> float:
        """The total time, if transfer and computation overlap."""
        return max(self.line_s, self.cores_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A size that a shard needs, and the upper limit of that size, in bytes."""

    name: str
    need: float
    limit: float

    @property
    def fits(self) -> bool:
        """True if the limit is not exceeded."""
        return self.need <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """The estimates, for all shards together.

    `publish`: the delta that every version has; `publish_full`, `publish_skips`: the further routes of some versions, a full snapshot and
    deltas over 16 and over 4 versions. `follow`: for a follower that has the previous version; `cold`: for a follower without weights at
    the worst moment; `cold_slow`: the same without deltas that skip versions. `chain`: the number of versions between two full snapshots.
    `kept`: the storage of `keep` versions, of which `skips` is for deltas that skip versions.
    """

    full_bytes: float
    ratio: float
    bits_per_change: float
    chain: int
    publish: Moved
    publish_full: Moved
    publish_skips: tuple[Moved, ...]
    follow: Moved
    cold: Moved
    cold_slow: Moved
    cold_hops: int
    kept: float
    skips: float
    limits: tuple[Limit, ...]
    least_shards: int


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise BadRequest(f"{name}: {value:g} is not between {least:g} and {most:g}", field=name)


def mask_bits(share: float) -> float:
    """Return H(p)/p, the bits per changed element to encode which elements changed, if all are equally likely.

    Example: ``mask_bits(0.01) == 8.079...``
    """
    rest = 1.0 - share
    return -math.log2(share) - (rest * math.log2(rest) / share if rest > 0 else 0.0)


def changed_after(share: float, versions: int, growth: float) -> float:
    """Return the share of elements that differ from `versions` versions ago, at most 1."""
    return min(1.0, share * versions**growth)


def delta_bytes(parameters: float, share: float, factor: float, snapshot: float = SNAPSHOT) -> float:
    """Return the payload bytes of a delta of 16-bit weights: at most a full snapshot's, which replaces it above `DENSEST`."""
    whole = 2 * parameters * snapshot
    return min(whole, parameters * share * mask_bits(share) * factor / 8) if share <= DENSEST else whole


def hops(first: int, last: int) -> list[int]:
    """Return how many versions each delta spans on the shortest route between two versions: from 26 to 48 it is [1, 1, 4, 16].

    Deltas over n versions exist only from and to versions whose number is a multiple of n.
    """
    spans: list[int] = []
    while first < last:
        spans.append(next(span for span in SKIPS if first % span == 0 and first + span <= last))
        first += spans[-1]
    return spans


def plan(deployment: Deployment, link: Link | None = None, cores: Cores | None = None) -> DeploymentPlan:
    """Compute all estimates."""
    link, cores = link or Link(), cores or Cores()
    full = 2 * deployment.parameters
    one = _span(deployment, 1)
    chain = min(deployment.anchor_every, math.floor(deployment.anchor_share * full / one))
    sizes = {span: _span(deployment, span) for span in SKIPS}
    # a full snapshot may be of any version
    routes = [hops(first, first + after) for first in range(max(SKIPS)) for after in range(chain + 1)]
    worst = max(routes, key=lambda route: sum(sizes[span] for span in route))
    slow = [full * deployment.snapshot, *[one] * chain]
    spans = [size for span, size in sizes.items() if span > 1]
    skips = sum(size * deployment.keep / span for size, span in zip(spans, SKIPS, strict=False))
    return DeploymentPlan(
        full_bytes=full,
        ratio=full / one,
        bits_per_change=8 * one / (deployment.parameters * deployment.changed),
        chain=chain,
        publish=_published(deployment, link, cores, one, is_full=False),
        publish_full=_published(deployment, link, cores, full * deployment.snapshot, is_full=True),
        publish_skips=tuple(_published(deployment, link, cores, size, is_full=False) for size in spans),
        follow=_followed(deployment, link, cores, [one], is_full=False),
        cold=_followed(
            deployment, link, cores, [full * deployment.snapshot, *(sizes[span] for span in worst)], is_full=True
        ),
        cold_slow=_followed(deployment, link, cores, slow, is_full=True),
        cold_hops=len(worst),
        kept=(full * deployment.snapshot / (chain + 1) + one) * deployment.keep + skips,
        skips=skips,
        limits=_limits(deployment, deployment.shards),
        least_shards=next(
            n for n in (1 << k for k in range(64)) if all(limit.fits for limit in _limits(deployment, n))
        ),
    )


def _span(deployment: Deployment, versions: int) -> float:
    share = changed_after(deployment.changed, versions, deployment.growth)
    return delta_bytes(deployment.parameters, share, deployment.factor, deployment.snapshot)


def _chunks(deployment: Deployment, shards: int) -> int:
    return math.ceil(deployment.parameters / shards / CHUNK_ELEMENTS)


def _limits(deployment: Deployment, shards: int) -> tuple[Limit, ...]:
    manifest = float(_chunks(deployment, shards) * MANIFEST_BYTES[0])
    size = 2 * deployment.parameters / shards
    return (
        Limit(name="manifest, uncompressed", need=manifest, limit=float(MAX_MANIFEST_BYTES)),
        Limit(name="weights of one version (max_bytes)", need=size, limit=float(deployment.max_bytes)),
    )


def _requests(size: float, deployment: Deployment) -> tuple[int, int, int]:
    """Return (objects, requests to write them, requests to read them) for the payloads or the manifest of one shard."""
    count = math.ceil(size / deployment.object_bytes)
    parts = math.ceil(min(size, deployment.object_bytes) / deployment.part_bytes)
    return count, count * (parts + 2 if parts > 1 else 1), count * parts


def _published(deployment: Deployment, link: Link, cores: Cores, size: float, *, is_full: bool) -> Moved:
    """Return the cost of publishing: encode, decode once to verify, hash before and after; look up each object before it is sent."""
    shards, manifest = deployment.shards, _chunks(deployment, deployment.shards) * MANIFEST_BYTES[1]
    count, puts, _ = _requests(size / shards, deployment)
    names, manifest_puts, _ = _requests(manifest, deployment)
    encode, decode = (cores.encode_full, cores.decode_full) if is_full else (cores.encode, cores.decode)
    work = 2 * deployment.parameters / shards / 1e9 / cores.count * (1 / encode + 1 / decode + 2 / cores.hash)
    writes, reads = puts + manifest_puts + _REF_WRITES, count + names + _REF_READS
    return Moved(
        bytes=size,
        objects=count * shards,
        puts=writes * shards,
        gets=reads * shards,
        line_s=link.seconds(size + manifest * shards, (writes + reads) * shards),
        cores_s=work,
    )


def _followed(deployment: Deployment, link: Link, cores: Cores, sizes: Sequence[float], *, is_full: bool) -> Moved:
    """Return the cost of following: decode each payload in turn, and hash every chunk. The first is a full snapshot if `is_full`."""
    shards, manifest = deployment.shards, _chunks(deployment, deployment.shards) * MANIFEST_BYTES[1]
    objects, gets, work = 0, _FOLLOWER_REF_READS, 0.0
    for at, size in enumerate(sizes):
        count, _, reads = _requests(size / shards, deployment)
        objects, gets = objects + count, gets + reads + _requests(manifest, deployment)[2]
        decode = cores.decode_full if is_full and at == 0 else cores.decode
        work += 2 * deployment.parameters / shards / 1e9 / cores.count * (1 / decode + 1 / cores.hash)
    total = sum(sizes)
    return Moved(
        bytes=total,
        objects=objects * shards,
        puts=0,
        gets=gets * shards,
        line_s=link.seconds(total + manifest * shards * len(sizes), gets * shards) + 3 * link.rtt_s,
        cores_s=work,
    )
