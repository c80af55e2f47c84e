"""What a rollout's outcome is worth, decided where the model cannot reach."""
