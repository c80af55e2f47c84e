"""The client's errors."""

from __future__ import annotations


class FeedbackError(Exception):
    """Base of this package's errors."""


class Refused(FeedbackError, ValueError):
    """The server will never take this event; the message says why. `field` is the part at fault, or None."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotAllowed(FeedbackError):
    """The API key is missing or wrong."""


class NotTaken(FeedbackError):
    """The server did not confirm the events in time, or too many wait; send them again with the same ids."""
