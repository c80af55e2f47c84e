"""The embedded engine: scheduler, KV cache, parallel forward pass, sampler and one worker thread."""
