"""Simulated worlds: tasks, agent harnesses, sandboxes for the code that a model wrote, graders, and rollouts for training."""
