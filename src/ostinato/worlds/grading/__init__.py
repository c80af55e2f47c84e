"""Graders: each grades the outcome of a rollout in an environment that the model's code cannot reach."""
