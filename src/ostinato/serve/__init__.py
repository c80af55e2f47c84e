"""HTTP: gateway, dialects, sessions, capture, arms, metrics."""
