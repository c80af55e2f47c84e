"""Who may share a prefix: the rule that every engine's prefix cache keeps."""

from __future__ import annotations

from hashlib import blake2b


def prefix_key(policy: str, salt: str) -> bytes:
    """16 bytes for one policy's hash and one cache salt: computed prefixes may be shared under the same key only.

    Example: ``prefix_key("9f2c", "acme") != prefix_key("9f2c", "evil")``
    """
    return blake2b(len(policy).to_bytes(4, "little") + policy.encode() + salt.encode(), digest_size=16).digest()
