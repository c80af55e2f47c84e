"""The next message of a conversation as a signal about the answer before it, written beside the calls: none waits for it or fails by it."""

from __future__ import annotations

import asyncio
import logging

from ostinato.core.conversation import Role
from ostinato.core.errors import OstinatoError
from ostinato.core.records import Purpose, Signal, Source
from ostinato.serve.calls.sessions import Question
from ostinato.serve.feedback.intake import Intake
from ostinato.serve.feedback.next_message import DISSATISFIED, VERSION, Next, asked_before, interrupted, kind_of, typed
from ostinato.serve.parts import Parts

_LOG = logging.getLogger(__name__)
_MOST = 256  # signals in one write
_RETRY_S = 2.0
_KEPT = 10_000  # signals kept in memory while the log takes nothing


class Overheard:
    """Listens to conversations that go on, if `serve.next_message` is set.

    Example: ``overheard.note(overheard.signals("acme", question, Purpose.TASK))``, and at the end ``await overheard.close()``
    """

    def __init__(self, parts: Parts, intake: Intake) -> None:
        self._on = parts.config.next_message
        self._clock = parts.clock
        self._intake = intake
        self._noted: list[Signal] = []
        self._writing: asyncio.Task[None] | None = None

    def signals(self, tenant: str, question: Question, purpose: Purpose) -> list[Signal]:
        """What a person's message says about the answer before it: nothing if the answer is of no turn that was found, or nobody typed."""
        messages, known = question.conversation.messages, question.known
        if not self._on or purpose is not Purpose.TASK or question.entry is None or question.conversation.continued:
            return []
        new = messages[known:]
        if not new or new[-1].role is not Role.USER or any(message.role is Role.ASSISTANT for message in new):
            return []
        now, id, turn = self._clock(), f"next-{question.chain[-1].hex()}", question.entry.turn
        said = _said(typed(new[-1].text), asked_before(question.conversation, known))
        found: list[tuple[str, str, str | None]] = []
        if interrupted(new[-1].text):
            found.append((f"{id}-i", "interrupted", None))
        if said is not None:
            found.append((id, *said))
        return [
            Signal(
                id=id,
                tenant=tenant,
                turn=turn,
                name=name,
                value=1.0,
                source=Source.IMPLICIT,
                occurred_at=now,
                received_at=now,
                comment=comment,
            )
            for id, name, comment in found
        ]

    def note(self, signals: list[Signal]) -> None:
        """Have them written soon. What was noted before counts once, by its id."""
        if not signals:
            return
        self._noted += signals
        if self._writing is None:
            self._begin()

    async def close(self) -> None:
        """Write what is noted; one try."""
        if self._writing is not None:
            await self._writing
        await self._write()

    def _begin(self) -> None:
        if self._writing is None and self._noted:
            self._writing = asyncio.ensure_future(self._write())
            self._writing.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        if self._noted:
            asyncio.get_running_loop().call_later(_RETRY_S, self._begin)

    async def _write(self) -> None:
        while self._noted:
            tenant = self._noted[0].tenant
            part = [signal for signal in self._noted if signal.tenant == tenant][:_MOST]
            ids = {signal.id for signal in part}
            try:
                await self._intake.take(part)
            except OstinatoError as error:
                dropped = max(0, len(self._noted) - _KEPT)
                self._noted = self._noted[dropped:]
                _LOG.warning(
                    "%d next messages are not written yet, %d were dropped: %s", len(self._noted), dropped, error
                )
                return
            self._noted = [signal for signal in self._noted if signal.tenant != tenant or signal.id not in ids]


def _said(message: str, before: str) -> tuple[str, str] | None:
    """The signal's name and comment."""
    if not message:
        return None
    kind = kind_of(message, before)
    name = "dissatisfied" if kind in DISSATISFIED else "praised" if kind is Next.PRAISE else "followed_up"
    return name, f"{kind.value} ({VERSION})"
