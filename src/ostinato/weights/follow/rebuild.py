"""The weights of a version, by the cheapest way that is whole: where one way is damaged another is taken."""

from __future__ import annotations

import logging

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.seams import WeightStore
from ostinato.weights.follow.shadow import Shadow
from ostinato.weights.version.chain import Known, Loaded, Manifests, cheapest, check_size

logger = logging.getLogger(__name__)


async def rebuild(store: WeightStore, manifests: Manifests, hash: str, known: Known, max_bytes: int) -> Loaded:
    """The weights of the manifest `hash`, by the cheapest way that is whole, each step of it verified.

    Raises:
        NotFound: an object is missing, and there is no way around it.
        Corrupt: an object, manifest or chunk is not what it promises; the message names the object.
    """
    target = await manifests.read(hash)
    damaged: dict[str, NotFound | Corrupt] = {}
    while True:
        try:
            start, hops = await cheapest(manifests, hash, known, frozenset(damaged), max_bytes)
        except (NotFound, Corrupt):
            if damaged:  # what went wrong first tells more than that no other way is left
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
