"""Programs that let a model work on a task: the same in production, in training and in evaluation."""
