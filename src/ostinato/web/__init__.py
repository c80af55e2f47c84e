"""Server-rendered pages and reports, without a build step."""
