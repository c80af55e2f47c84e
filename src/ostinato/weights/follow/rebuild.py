"""Rebuilds the weights of a version by the cheapest undamaged route."""

from __future__ import annotations

import logging

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.seams import WeightStore
from ostinato.weights.follow.shadow import Shadow
from ostinato.weights.version.chain import Known, Loaded, Manifests, cheapest, check_size

logger = logging.getLogger(__name__)


async def rebuild(store: WeightStore, manifests: Manifests, hash: str, known: Known, max_bytes: int) -> Loaded:
    """The weights of the manifest `hash`, by the cheapest undamaged route, with every step verified.

    Raises:
        NotFound: an object is missing, and no other route avoids it.
        Corrupt: an object, manifest or chunk does not match its hash or declaration; the message names the object.
    """
    target = await manifests.read(hash)
    damaged: dict[str, NotFound | Corrupt] = {}
    while True:
        try:
            start, hops = await cheapest(manifests, hash, known, frozenset(damaged), max_bytes)
        except (NotFound, Corrupt):
            if damaged:  # the first error says more than that no other route is left
                raise next(iter(damaged.values())) from None
            raise
        shadow = Shadow(start)
        for hop in hops:
            try:
                manifest = await manifests.read(hop)
                check_size(hop, manifest, max_bytes)
                await shadow.apply(store, hop, manifest)
            except (NotFound, Corrupt) as error:
                logger.warning("version %s: %s; looking for another way", target.policy, error)
                damaged[hop] = error
                break
        else:
            if shadow.root == target.root:
                return Loaded(hash, target, shadow.weights())
            damaged[hops[-1]] = Corrupt(f"manifest {hops[-1]}: is of root {shadow.root}, not of {target.root}; refused")
