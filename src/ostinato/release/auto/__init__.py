"""Auto: one model name that routes among arms by what people made of their answers."""
