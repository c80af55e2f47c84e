"""The `e2b` backend: sandboxes that are virtual machines in E2B's cloud, or on your own server that implements its API."""

from ostinato.worlds.sandbox.e2b.backend import E2BBoxes

__all__ = ["E2BBoxes"]
