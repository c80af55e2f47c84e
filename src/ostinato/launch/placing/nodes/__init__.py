"""Workers on the nodes of a cluster that Ray keeps: Ray says where, the supervisor says when."""
