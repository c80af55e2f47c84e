"""Load a Hugging Face causal LM; attention rules; messages <-> tokens."""

from ostinato.model.lazy_imports import defer

defer()
