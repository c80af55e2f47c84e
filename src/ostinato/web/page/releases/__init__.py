"""One release on the page: what is known of it, the sentences that answer for it, and its charts."""
