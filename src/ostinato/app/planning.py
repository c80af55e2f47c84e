"""Plans a cycle, with the weight store's own plan for the cost of publishing and following."""

from __future__ import annotations

from ostinato.compute.description import Description
from ostinato.compute.plan import CyclePlan, Delivery, plan_cycle
from ostinato.core.errors import BadConfig
from ostinato.weights.plan import Cores, Deployment, Link, plan


def planned(told: Description) -> CyclePlan:
    """The plan of a description. Raises BadConfig, which names the field, if something does not fit."""
    return plan_cycle(told, deliveries(told))


def deliveries(told: Description) -> Delivery:
    """The delivery of one version to every region. Weights not of 16 bits count as the number of 16-bit weights with the same bytes."""
    sent = told.publication
    deployment = Deployment(
        parameters=told.model.parameters * told.model.weight_bytes / 2,
        changed=sent.changed,
        shards=sent.shards,
        factor=sent.factor,
    )
    cores = Cores(count=sent.cores, encode=sent.encode, decode=sent.decode)
    lines = {"": Link(gbit_s=sent.gbit, rtt_s=sent.rtt_ms / 1e3, streams=sent.streams)}
    lines |= {
        name: Link(gbit_s=region.gbit, rtt_s=region.rtt_ms / 1e3, streams=sent.streams)
        for name, region in told.regions.items()
    }
    ways = {name: plan(deployment, line, cores) for name, line in lines.items()}
    here = ways.pop("")
    for limit in here.limits:
        if not limit.fits:
            raise BadConfig(f"publication.shards: {limit.name} does not fit in {sent.shards}; {here.least_shards} do")
    return Delivery(
        bytes=here.publish.bytes,
        encode_s=here.publish.cores_s,
        upload_s=here.publish.line_s,
        regions={name: (way.follow.line_s, way.follow.cores_s) for name, way in ways.items()},
    )
