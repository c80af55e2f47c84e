"""Proof of a product user's identity, made by the product's own server."""

from __future__ import annotations

import hashlib
import hmac
import time


def sign_user(secret: str, user: str, *, lifetime_s: float = 3600.0, now: float | None = None) -> str:
    """The value of the header `X-Ostinato-User-Signature` for this user; `secret` is one of the server's `serve.user_keys`.

    Example: ``extra_headers={"X-Ostinato-User-Signature": sign_user(secret, "u42")}`` beside ``user="u42"``
    """
    expires = int((time.time() if now is None else now) + lifetime_s)  # noqa: TID251 (a package of its own: no Clock here)
    digest = hmac.new(secret.encode(), f"{expires}.{user}".encode(), hashlib.sha256).hexdigest()
    return f"{expires}.{digest}"
