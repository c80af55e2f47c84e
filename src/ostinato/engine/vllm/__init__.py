"""An engine that is a client of vLLM servers: it sends token ids and receives token ids and log-probabilities."""
