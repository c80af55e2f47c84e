"""How many sandboxes start how fast on which machines: a simulation, to plan by."""
