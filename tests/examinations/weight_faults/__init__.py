"""The fault examination of the weight store: every fault with its outcome, with real processes."""
