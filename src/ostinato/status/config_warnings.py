"""Warnings about what a configuration leaves unguarded, one line each: users who are not verified, and users whom nothing monitors."""

from __future__ import annotations

from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.serve.auth import client_keys, key_holders


def config_warnings(config: Config) -> dict[str, str]:
    """Return the warnings that apply, as {worker: warning}."""
    found = {"train": unproven_users(config), "release": unwatched_users(config)}
    return {worker: words for worker, words in found.items() if words}


def unwatched_users(config: Config) -> str:
    """Return the warning that versions ship automatically and nothing compares users' behaviour afterwards; "" if it does not apply."""
    ships = bool(config.evaluate.suite) and config.release.approval == "auto" and config.learn.source != "worlds"
    if not ships or config.release.canary or config.serve.control_share:
        return ""
    return (
        "Nothing watches users: a candidate that passes the suite goes to all of them at once, and no group is left to compare them with. "
        "Set serve.control_share (0.05 keeps a twentieth on the first checkpoint), or release.canary with some hundreds of users a day."
    )


def unproven_users(config: Config) -> str:
    """Return the warning that users are only declared although several tenants teach one model; "" if it does not apply.

    A single tenant would only cheat itself. Keys that cannot be read are reported elsewhere.
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
