"""Rollouts of tasks in groups: draws tasks, works on them, grades the outcomes, and reports each once, whatever is killed."""
