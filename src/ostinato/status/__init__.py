"""The read model of a run: what its log, its weights and its files say, as plain data for the page, `status` and the report."""
