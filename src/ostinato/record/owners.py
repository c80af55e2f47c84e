"""Decides whose key each text that people wrote is encrypted under."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from ostinato.core.records import Signal, Turn
from ostinato.record.codec.kinds import SIGNALS
from ostinato.record.codec.rows import Ready
from ostinato.record.config import Encrypt
from ostinato.record.keys import KeyRing, Scope

Owners = Mapping[str, tuple[str, str]]
"""Turn id -> (tenant, user)."""


def assign(rows: Sequence[Ready], mode: Encrypt, ring: KeyRing, known: Callable[[Sequence[str]], Owners]) -> None:
    """Assign each row's text a key; new keys are stored on return. `known` gives the owners of turns in the log."""
    if mode is Encrypt.NONE:
        return
    ring.refresh()
    owners = _owners(rows, known) if mode is Encrypt.USER else {}
    scopes: list[tuple[Ready, Scope]] = []
    for row in rows:
        if isinstance(row.row, Turn):
            scopes.append((row, Scope(row.row.tenant, row.row.user if mode is Encrypt.USER else None)))
        elif row.kind is SIGNALS and row.said is not None:
            scopes.append((row, _scope(mode, cast("Signal", row.row), owners)))
    numbers = ring.numbers(scope for _, scope in scopes)
    for row, scope in scopes:
        row.secret = numbers[scope]


def _owners(rows: Sequence[Ready], known: Callable[[Sequence[str]], Owners]) -> Owners:
    """The owners of all turns that signals with text refer to, as far as the turns are known."""
    fresh = {row.row.id: (row.row.tenant, row.row.user) for row in rows if isinstance(row.row, Turn)}
    told = dict.fromkeys(row.row.turn for row in rows if isinstance(row.row, Signal) and row.said is not None)
    older = [turn for turn in told if turn not in fresh]
    return {**fresh, **(known(older) if older else {})}


def _scope(mode: Encrypt, signal: Signal, owners: Owners) -> Scope:
    """The key scope of a signal's text: its turn's user, or the turn itself if the turn is not known yet."""
    if mode is Encrypt.TENANT:
        return Scope(signal.tenant)
    tenant, user = owners.get(signal.turn, (None, None))
    return Scope(signal.tenant, user=user) if tenant == signal.tenant else Scope(signal.tenant, turn=signal.turn)
