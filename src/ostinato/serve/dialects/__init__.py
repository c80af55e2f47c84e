"""What the gateway speaks: requests in, replies out."""
