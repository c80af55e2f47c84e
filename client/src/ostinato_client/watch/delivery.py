"""Sends stored signals to the gateway. While it is unreachable they wait, and a signal sent twice counts once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ostinato_client.connect.agent_settings import DEFAULT_URL, URL_VARIABLE
from ostinato_client.errors import NotAllowed, NotTaken, Refused
from ostinato_client.events import Event
from ostinato_client.sending import Sender
from ostinato_client.watch.state import State

_BATCH = 200
_DEADLINE_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class Delivery:
    """Sends the waiting signals, and pauses after a failure.

    Example: ``Delivery(state, Sender(url, key), time.monotonic).send()``
    """

    def __init__(self, state: State, sender: Sender, clock: Callable[[], float]) -> None:
        self._state = state
        self._sender = sender
        self._clock = clock
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = -1e300
        self.trouble = ""
        """Why the last sending failed; empty if it succeeded."""

    def send(self) -> bool:
        """Send the waiting signals, unless it is too early to try again; True if none waits any more."""
        while waiting := self._state.waiting(_BATCH):
            if self._clock() < self._not_before:
                return False
            try:
                self._send(waiting)
            except (NotTaken, NotAllowed, ValueError) as error:  # the last for a name or proxy that is none
                self.trouble = str(error)
                self._not_before = self._clock() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                return False
            self._pause_s, self.trouble = _FIRST_PAUSE_S, ""
        return True

    def _send(self, events: list[Event]) -> None:
        try:
            self._sender.send(events, _DEADLINE_S)
        except Refused as error:
            if len(events) == 1 and events[0].lines:
                # an earlier server knows no lines, and an agent may have changed a call's text before it ran: the share counts all the same
                self._send([replace(events[0], lines=None)])
                return
            if len(events) == 1:
                self._state.refused(events[0], str(error))
                return
            for event in events:  # one bad event must not take its neighbours with it
                self._send([event])
            return
        self._state.sent(events)


def known_url(env: Mapping[str, str]) -> str:
    """The gateway that a person's own agents are connected to, else this machine's.

    Settings inside a repository are not read, because their author could have the key sent elsewhere.
    """
    home = Path(env.get("HOME") or os.path.expanduser("~"))
    claude = Path(env.get("CLAUDE_CONFIG_DIR") or home / ".claude") / "settings.json"
    opencode = Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "opencode" / "opencode.json"
    found = (
        env.get(URL_VARIABLE),
        _at(claude, "env", "ANTHROPIC_BASE_URL"),
        _at(opencode, "provider", "ostinato", "options", "baseURL"),
    )
    return next((root for url in found if url and (root := _root(url))), DEFAULT_URL)


def _at(path: Path, *names: str) -> str | None:
    try:
        value: Any = json.loads(path.read_text("utf-8"))
        for name in names:
            value = value[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _root(url: str) -> str | None:
    """A base URL without the session and version parts of an agent's URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or (parts.hostname or "").endswith("anthropic.com"):
        return None
    return f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/').removesuffix('/v1').partition('/s/')[0]}"
