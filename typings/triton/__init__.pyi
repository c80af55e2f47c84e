# All that pyright is to know of Triton: the same where it is not installed, and nothing of how a kernel is called.
from typing import Any

def __getattr__(name: str) -> Any: ...
