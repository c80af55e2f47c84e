"""Views of a run for people: the terminal, the page in the gateway, metrics, the audit trail."""
