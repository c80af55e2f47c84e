"""Sandboxes that are virtual machines in E2B's cloud, or on your own server that speaks its protocol."""

from ostinato.worlds.sandbox.e2b.backend import E2BBoxes

__all__ = ["E2BBoxes"]
