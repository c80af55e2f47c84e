"""The embedded engine: scheduler, KV blocks, lanes, sampler, one worker thread."""
