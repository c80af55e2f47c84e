"""What a run's files say of its simulated worlds: finished rollouts, the rollout worker's journal, the taskset."""
