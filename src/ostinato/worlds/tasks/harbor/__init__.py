"""Tasks as folders of Harbor's (0.25.0): task.toml, instruction.md, environment/, tests/, solution/."""
