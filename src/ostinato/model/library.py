"""What transformers may import beside itself. Import this before its modelling code.

It asks which libraries are installed, and imports some of them with every model for uses that no process of ours makes.
"""

from __future__ import annotations

from transformers import utils
from transformers.utils import import_utils

UNUSED = ("accelerate", "scipy")
"""They place parts of a model on several devices, and train detectors of objects. A tenth of what a gateway's start would import."""


def _missing(*_: object) -> bool:
    return False


for _name in UNUSED:
    for _place in (utils, import_utils):
        setattr(_place, f"is_{_name}_available", _missing)
