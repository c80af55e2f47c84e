"""An organisation's part in a shared prior: the sum of its people's clipped contributions, split into two shares that are noise each.

python examples/federated/organisation.py NAME SEED http://127.0.0.1:9001 http://127.0.0.1:9002
"""

import asyncio
import os
import sys

import aiohttp
import numpy as np

from ostinato.adapt.learner import Evidence
from ostinato.adapt.privacy import Grid, total_contribution

CLIP, DIALS = 0.3, 8  # the same for all organisations of a round


def people(seed: int) -> list[Evidence]:
    """A hundred simulated people with 40 ratings each. Put here what your log says: `PersonState.evidence` of people who consented."""
    rng, found = np.random.default_rng(seed), list[Evidence]()
    for _ in range(100):
        slopes_K = 0.05 * np.ones(DIALS) + 0.05 * rng.normal(size=DIALS)
        rows_ND = np.hstack([rng.normal(size=(40, DIALS)), np.ones((40, 1))])
        rewards_N = rows_ND @ np.append(slopes_K, 0.5) + 0.3 * rng.normal(size=40)
        precision_DD, shift_D = rows_ND.T @ rows_ND / 0.22, rows_ND.T @ rewards_N / 0.22
        found.append(Evidence(precision_DD.astype(np.float32), shift_D.astype(np.float32), ratings=40))
    return found


def shares(total_P: Grid) -> tuple[bytes, bytes]:
    """Two vectors that add up to this one modulo 2^64, each uniformly random by itself."""
    mask_P = np.frombuffer(os.urandom(8 * len(total_P)), "<u8")
    return mask_P.tobytes(), (total_P.view(np.uint64) - mask_P).astype("<u8").tobytes()


async def main(name: str, seed: int, *aggregators: str) -> None:
    """Send a share to each aggregator. An organisation that dies in between is left out of the sum."""
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        for url, share in zip(aggregators, shares(total_contribution(people(seed), DIALS, CLIP)), strict=True):
            await http.put(f"{url}/shares/{name}", data=share)
            print(f"sent a share to {url}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
