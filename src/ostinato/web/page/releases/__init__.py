"""One release on the page: its evidence, the answers about it in sentences, and its charts."""
