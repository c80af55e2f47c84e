"""What runs in the sandbox's own processes, by path and on the standard library alone; nothing else imports it."""
