"""A prior of several organisations' people, from sums that nobody sees an organisation's part of. Run at the end of a round:

python examples/federated/federated_prior.py http://127.0.0.1:9001 http://127.0.0.1:9002

Each organisation splits its vector into two shares, uniformly random by themselves, and sends one to each aggregator (additive secret
sharing). Each aggregator adds up what it has of those that both have, adds noise to the sum, and tells it once; the two sums add up to
the total. That is private as long as the two operators do not collude; against each of them the other's noise is left. Put TLS and
authentication in front, and let in only organisations that you trust to clip: nobody can see that a share holds too much.
"""

import asyncio
import sys

import aiohttp
import numpy as np
from organisation import CLIP

from ostinato.adapt.privacy import Grid, prior_of


async def total(*aggregators: str) -> tuple[list[str], Grid]:
    """The organisations that both aggregators have a share of, and the sum over them."""
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        known = [set[str](await (await http.get(f"{url}/shares")).json()) for url in aggregators]
        named = sorted(set.intersection(*known))
        sums = [await (await http.post(f"{url}/sum", json=named)).read() for url in aggregators]
    return named, np.stack([np.frombuffer(each, "<u8") for each in sums]).sum(0, dtype=np.uint64).view(np.int64)


async def main(*aggregators: str) -> None:
    """Print the prior."""
    named, total_P = await total(*aggregators)
    prior, people = prior_of(total_P, CLIP)
    print(f"{', '.join(named)}: about {people:.0f} people")
    print("means of the slopes:", *(f"{mean:+.3f}" for mean in prior.mean_D[:-1]))
    print(
        "their deviations between people:", *(f"{variance**0.5:.3f}" for variance in np.diag(prior.covariance_DD)[:-1])
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
