"""What `ostinato worlds run` does: weights that stand still, tasks tried with them, and what came of it."""
