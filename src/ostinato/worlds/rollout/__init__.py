"""Rollouts of tasks in groups: which task is next, who works on it, what it was worth, told once whatever is killed."""
