"""The read model of a run's simulated worlds: finished rollouts, the rollout worker's journal, the taskset."""
