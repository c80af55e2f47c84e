"""The read model of a run: queries over its log, weights and files, as plain data for the page, `status` and the report."""
