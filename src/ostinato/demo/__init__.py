"""The inline copilot example: its tasks and its simulated users."""
