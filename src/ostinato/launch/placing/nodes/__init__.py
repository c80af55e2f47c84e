"""Workers on the nodes of a Ray cluster: Ray decides where they run, the supervisor when."""
