"""Simulated worlds on the page: tasksets, success by family and version, rollouts under way, one rollout step by step, one task."""
