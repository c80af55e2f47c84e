"""The parts of `ostinato worlds run`: weights that are held still, tasks tried with them, and the results."""
