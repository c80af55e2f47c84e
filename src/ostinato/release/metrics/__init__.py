"""Metrics of people's turns: their declarations, their values for a turn, and the log's turns joined with their signals."""
