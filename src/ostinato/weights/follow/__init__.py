"""Following: a ref -> verified weights in memory."""
