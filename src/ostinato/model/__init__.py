"""Load a Hugging Face causal LM; attention rules; messages <-> tokens."""
