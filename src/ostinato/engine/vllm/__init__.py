"""An engine that is a client of vLLM servers: token ids in, token ids and log-probabilities out."""
