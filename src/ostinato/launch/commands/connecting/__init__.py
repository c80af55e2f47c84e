"""The parts of `ostinato connect`: the agents' settings, their file formats, the files on disk, and the calls to the gateway."""
