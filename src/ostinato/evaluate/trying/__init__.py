"""Gets answers for a measurement, with retries and from the intended version, each a single answer or a whole rollout."""
