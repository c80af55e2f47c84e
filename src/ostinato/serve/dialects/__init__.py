"""The API dialects of the gateway: requests in, replies out."""
