"""Engines that sample tokens: the embedded engine, and clients of inference servers."""
