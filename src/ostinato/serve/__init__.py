"""The HTTP gateway: API dialects, authentication, quotas, sessions, capture of turns, assignment to arms, feedback and metrics."""
