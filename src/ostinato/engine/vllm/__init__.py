"""The engine over vLLM servers: a client that sends token ids and receives token ids with their log-probabilities."""
