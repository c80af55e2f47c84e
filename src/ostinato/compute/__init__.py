"""Where compute goes: operations by phase, a cycle on paper, workers that move between sampling and training, borrowed replicas."""
