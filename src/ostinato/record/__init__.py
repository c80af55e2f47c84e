"""The append-only log on SQLite or Postgres: segments, group commit, encryption, retention, backups, process roles."""
