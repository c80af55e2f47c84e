"""Worker processes: their main loops, where they run, their supervision, and the terminal commands on them."""
