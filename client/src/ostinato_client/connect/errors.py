"""Errors of `ostinato-connect`. Each message is one line that names the option, file or address at fault, and the remedy.

ConnectError
├── BadConfig       an option or a settings file cannot be used
├── NotFound        nothing to undo
├── Conflict        the file was changed by somebody else
├── StorageFull     the file cannot be written
├── Unauthorized    the gateway's key is missing or wrong
└── Unavailable     the gateway cannot be reached, or not now
"""

from __future__ import annotations


class ConnectError(Exception):
    """Base of these errors."""


class BadConfig(ConnectError, ValueError):
    """An option, a setting or a settings file cannot be used."""


class NotFound(ConnectError, LookupError):
    """There is nothing to undo."""


class Conflict(ConnectError):
    """The file was changed by somebody else, and is left as it is."""


class StorageFull(ConnectError, OSError):
    """A file cannot be written; what was there before is still there."""


class Unauthorized(ConnectError):
    """The gateway's key is missing or wrong."""


class Unavailable(ConnectError):
    """The gateway cannot be reached or cannot answer now; the same call may succeed later."""
