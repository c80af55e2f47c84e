"""The tasks of simulated worlds, and the file formats that hold them."""
