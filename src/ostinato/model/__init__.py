"""Load any Hugging Face causal LM; attention rules; messages <-> tokens."""
