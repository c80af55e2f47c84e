"""Which requests may share a cached prefix: the rule for every engine's prefix cache."""

from __future__ import annotations

from hashlib import blake2b


def prefix_key(policy: str, salt: str) -> bytes:
    """A 16-byte key for a policy's hash and a cache salt: computed prefixes may be shared only under the same key.

    Example: ``prefix_key("9f2c", "acme") != prefix_key("9f2c", "evil")``
    """
    return blake2b(len(policy).to_bytes(4, "little") + policy.encode() + salt.encode(), digest_size=16).digest()
