"""Tasks as Harbor folders (0.25.0): task.toml, instruction.md, environment/, tests/, solution/."""
