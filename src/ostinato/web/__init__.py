"""Server-rendered pages and reports; no build step."""
