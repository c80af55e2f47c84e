"""Auto: one model name that routes among arms by people's reactions to their answers."""
