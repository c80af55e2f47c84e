"""The log in a Postgres database, for runs whose workers are on several machines. Needs psycopg: ``pip install 'ostinato[postgres]'``."""
