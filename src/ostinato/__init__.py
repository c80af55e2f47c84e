"""Real-time reinforcement learning of the model behind a product."""

__version__ = "0.1.0"
