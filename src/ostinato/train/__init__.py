"""Losses, batch packing, trainer, optimizer, checkpoint."""
