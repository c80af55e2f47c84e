"""The append-only log: schema, migrations, group commit, process locks."""
