"""What `ostinato connect` is made of: the agents' settings, the forms they are kept in, the files, and the gateway asked."""
