"""What a cycle would take on paper, and what a run's operations went to."""
