"""The gate, as pure maths: the draws of a round, quality bars, the verdict, and a suite's resolution."""
