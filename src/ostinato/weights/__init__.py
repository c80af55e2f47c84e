"""The weight store: every version, everywhere, bit for bit."""
