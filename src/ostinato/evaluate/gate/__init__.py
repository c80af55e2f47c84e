"""The gate, as pure maths: what is drawn in a round, quality bars, the verdict, and what a suite can resolve."""
