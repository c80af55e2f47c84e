"""Metrics of people's turns: their declarations, their values of a turn, and the log's turns joined with their signals."""
