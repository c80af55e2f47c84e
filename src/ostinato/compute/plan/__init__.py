"""Plans a cycle: from a description of model, traffic and hardware to machines, bytes, seconds and money by phase."""
