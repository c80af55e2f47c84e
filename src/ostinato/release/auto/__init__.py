"""Auto: one model name that routes each episode to one of several arms by what people's reactions reward."""
