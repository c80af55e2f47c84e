"""Engines that make tokens: the embedded one, and clients of servers."""
