"""The model: loading a Hugging Face causal LM, attention and kernels, chat templates, grammars, and parsing of answers."""
