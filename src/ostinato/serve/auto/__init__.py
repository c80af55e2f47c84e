"""Auto: a model name for which an arm is drawn per episode, either a slot that is served here or an outside model."""
