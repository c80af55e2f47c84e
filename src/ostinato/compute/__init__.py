"""Accounting and allocation of compute: FLOPs by phase, cycle planning, the number of rollout workers, and replicas lent to rollouts."""
