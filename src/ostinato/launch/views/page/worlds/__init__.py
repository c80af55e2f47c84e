"""The page's facts about simulated worlds: from the record of finished rollouts, the rollout worker's journal, and the taskset file."""
