"""A cycle on paper: from a description of model, traffic and hardware to machines, bytes, seconds and money by phase."""
