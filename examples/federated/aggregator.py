"""One of the two servers that add up organisations' shares without seeing whose people rate how; see federated_prior.py.

Run it twice, by two operators who do not collude: python examples/federated/aggregator.py PORT SIGMA
SIGMA is the noise multiplier (`ostinato.adapt.privacy.gaussian_sigma`); 0 adds no noise, for a trial.
"""

import sys

import numpy as np
from aiohttp import web

from ostinato.adapt.privacy import noised

LEAST = 2  # organisations without which no sum is told: of one alone, it would be that one's


def aggregator(sigma: float) -> web.Application:
    """A server of one round: PUT /shares/NAME takes one share each, GET /shares lists the names, POST /sum tells the sum, once."""
    shares, sums = dict[str, np.ndarray](), dict[tuple[str, ...], bytes]()

    async def put(request: web.Request) -> web.Response:
        name, share = request.match_info["name"], np.frombuffer(await request.read(), "<u8")
        if name in shares or sums or any(len(other) != len(share) for other in shares.values()):
            raise web.HTTPConflict(
                text=f"{name} has sent a share, the round is over, or others' shares have other lengths"
            )
        shares[name] = share
        return web.Response()

    async def names(_: web.Request) -> web.Response:
        return web.json_response(sorted(shares))

    async def total(request: web.Request) -> web.Response:
        named: tuple[str, ...] = tuple(sorted(set(await request.json())))
        if len(named) < LEAST or not shares.keys() >= set(named):
            raise web.HTTPBadRequest(text=f"a sum is of at least {LEAST} of {sorted(shares)}")
        if not sums:
            total_P = np.stack([shares[name] for name in named]).sum(0, dtype=np.uint64)
            sums[named] = noised(total_P.view(np.int64), sigma).astype("<i8").tobytes()
        if named not in sums:  # the difference of two sums would be one organisation's
            raise web.HTTPConflict(text=f"this round's sum is told of {', '.join(*sums)} and of no others")
        return web.Response(body=sums[named])

    app = web.Application()
    app.add_routes([web.put("/shares/{name}", put), web.get("/shares", names), web.post("/sum", total)])
    return app


if __name__ == "__main__":
    web.run_app(aggregator(float(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]))
