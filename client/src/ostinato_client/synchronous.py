"""The client for programs without asyncio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from ostinato_client.background import Background
from ostinato_client.events import Event, Receipt
from ostinato_client.sending import Sender


class Ostinato:
    """Sends feedback: `feedback` waits until it is durable, `enqueue` does not wait.

    Args:
        base_url: the server, with or without "/v1".
        api_key: as given to the OpenAI client.
        deadline_s: longest time for one call, retries included.

    Example::

        Ostinato("http://127.0.0.1:8321").feedback(completion.id, "accepted", True)
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, deadline_s: float = 5.0) -> None:
        self._sender = Sender(base_url, api_key)
        self._deadline_s = deadline_s
        self._background = Background(self._sender)

    def __enter__(self) -> Ostinato:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> bool:
        """Send what was enqueued; False if that took longer than the deadline."""
        return self._background.close(self._deadline_s)

    def feedback(
        self,
        target: str,
        name: str,
        value: bool | float | None = None,
        *,
        source: str = "human",
        correction: str | None = None,
        comment: str | None = None,
        occurred_at: float | str | None = None,
        retracts: str | None = None,
        id: str | None = None,
    ) -> Receipt:
        """Report what happened to an answer (see `Event`); the report is durable when this returns.

        Raises:
            Refused: the server will never take it; the message names the field.
            NotAllowed: the key is wrong.
            NotTaken: the server did not confirm it before the deadline.
        """
        event = Event(target, name, value, source, correction, comment, occurred_at, retracts, **_given(id))
        return self._sender.send([event], self._deadline_s)[0]

    def consent(self, user: str, train: str | None = None, *, signature: str | None = None) -> str:
        """Record what a user allows to be done with their turns, or ask for it; returns what is recorded.

        Args:
            user: the user's name, as in the calls.
            train: "never", "aggregate", "adapt" or "yes"; None: only ask.
            signature: the user's (`sign_user`); a looser choice than the recorded one needs it.

        Raises as `feedback` does.
        """
        return self._sender.choose(user, train, signature, self._deadline_s)

    def dials(self, user: str, *, signature: str | None = None) -> dict[str, Any]:
        """A user's dials, as `GET /v1/adaptation` shows them: each one's `value` with a 95% interval (`low`, `high`), what it was `set` to
        by hand, and `words` for it; `active`, and if it is false why (`off`).

        Args:
            user: the user's name, as in the calls.
            signature: the user's (`sign_user`); needed unless any declared name has dials (`adapt.users`).

        Raises as `feedback` does.
        """
        return self._sender.dials("GET", user, None, signature, self._deadline_s)

    def set_dials(
        self, user: str, dials: Mapping[str, float | str | None], *, signature: str | None = None
    ) -> dict[str, Any]:
        """Set some of a user's dials by hand, from -3 to 3, or with None return one to the prior; returns all as `dials` does.
        `"style"` takes the name of a style, or None.

        For example: ``client.set_dials("u42", {"brief": 0.5, "lists": None}, signature=sign_user(secret, "u42"))``
        """
        return self._sender.dials("PUT", user, dict(dials), signature, self._deadline_s)

    def reset_dials(self, user: str, *, signature: str | None = None) -> dict[str, Any]:
        """Return all dials of a user to the prior: no rating so far counts any more; returns them as `dials` does."""
        return self._sender.dials("DELETE", user, None, signature, self._deadline_s)

    def feedback_many(self, events: Iterable[Event]) -> list[Receipt]:
        """Report many events, a thousand per request; returns a receipt for each, in order. Raises as `feedback` does."""
        return self._sender.send(list(events), self._deadline_s)

    def enqueue(
        self,
        target: str,
        name: str,
        value: bool | float | None = None,
        *,
        source: str = "human",
        correction: str | None = None,
        comment: str | None = None,
        occurred_at: float | str | None = None,
        retracts: str | None = None,
        id: str | None = None,
    ) -> str:
        """Have the event sent by a background thread, with retries for a minute at a time; returns the event's id at once.

        At its end the program waits up to five seconds for unsent events. Raises NotTaken if 10,000 events wait.
        """
        event = Event(target, name, value, source, correction, comment, occurred_at, retracts, **_given(id))
        self._background.put(event)
        return event.id

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything enqueued was sent; False if it was not."""
        return self._background.flush(timeout_s)


def _given(id: str | None) -> dict[str, Any]:
    return {} if id is None else {"id": id}
