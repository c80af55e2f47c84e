"""A harness's identity: the hash of everything that decides what the model sees. Pure."""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3


def harness_hash(name: str, version: int, **shown: Any) -> str:
    """16 hex digits of the BLAKE3 of a harness's name, its version and what it shows: prompts, tools, limits (all as JSON, keys sorted).

    `version` must be raised with every code change that changes what a model sees.
    """
    text = json.dumps({"name": name, "version": version, "shown": shown}, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
