"""Explicit backward passes in place of autograd's. The forward bits are the engine's."""
