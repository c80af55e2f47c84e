"""Following: turns a ref into verified weights in memory."""
