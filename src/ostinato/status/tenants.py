"""What several tenants mean for the defences against poisoning: whether one tenant's key can pose as many users."""

from __future__ import annotations

from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.serve.auth import client_keys, key_holders


def unproven_users(config: Config) -> str:
    """The warning, in a line for people, that users are only declared although several tenants teach one model; "" where it is not due.

    One tenant alone would only cheat itself. Keys that cannot be read are reported elsewhere.
    """
    try:
        tenants = key_holders(client_keys(config.serve.api_keys, config.serve.api_keys_file))
    except BadConfig:
        return ""
    if len(tenants) < 2 or config.reward.users == "verified":
        return ""
    return (
        f'{len(tenants)} tenants teach one model, and reward.users is "declared": the caps per user count the names that callers give, so '
        "one key can pose as any number of users. Let the tenants sign who their users are (serve.user_keys), and set reward.users = "
        '"verified".'
    )
