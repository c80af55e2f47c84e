"""The vocabulary: records, policy versions, seams, errors, clock. Standard library and numpy only."""
