"""What the backward pass computes by itself instead of leaving it to autograd. The forward bits are the engine's."""
