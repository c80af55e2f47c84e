"""Auto: a model name behind which an arm is drawn for each episode: a slot that is served here, or a model outside."""
