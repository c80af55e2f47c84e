"""Sandboxes that are virtual machines of E2B's cloud, or of a server of one's own that speaks its protocol."""

from ostinato.worlds.sandbox.e2b.backend import E2BBoxes

__all__ = ["E2BBoxes"]
