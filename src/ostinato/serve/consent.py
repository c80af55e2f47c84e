"""Consent: what may be done with a turn. The strictest of the operator's settings, the person's recorded choice and the request applies.

A person's choice is a row in the log. `GET /v1/consent` returns it; `PUT /v1/consent` records it, and it applies until the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.errors import BadRequest, Unauthorized
from ostinato.core.notices import Forgotten
from ostinato.core.records import Consent, ConsentGiven, Person
from ostinato.core.seams import Cursor, Log
from ostinato.serve.auth import Principal
from ostinato.serve.dialects.dialect import User, validate
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.writes import in_time

if TYPE_CHECKING:
    from ostinato.serve.parts import Parts

_LOG = logging.getLogger(__name__)
EVERY_S = 1.0
"""Seconds between two polls of the log: the delay until choices made through another gateway or a command apply here."""


def read_level(name: str, field: str) -> Consent:
    """Return a consent level by its name. Raises BadRequest naming the field and the levels."""
    try:
        return Consent(name)
    except ValueError:
        raise BadRequest(f"{field} takes {', '.join(Consent)}.", field=field) from None


def choice_id(person: Person, last: Cursor) -> str:
    """Return the id of a person's next choice, given the log position of the last (0: none). Of two choices recorded at once the log keeps
    one, and the other must be decided again (optimistic concurrency).

    Example: ``choice_id(("acme", "ann"), 0)``
    """
    name = json_bytes([*person, last])
    return f"consent-{blake2b(name, digest_size=16).hexdigest()}"


class ConsentChoices:
    """People's recorded choices, folded from the log. `forgotten` is called for each row about a forgotten person; their choice remains.

    Example: ``choices.of(("acme", "ann")) is Consent.NEVER``
    """

    def __init__(self, log: Log, forgotten: Callable[[Forgotten], None] = lambda _: None) -> None:
        self._log, self._forgotten = log, forgotten
        self._levels: dict[Person, tuple[Consent, Cursor]] = {}  # the newest choice, and its position in the log
        self._cursor: Cursor | None = None
        self._turn = asyncio.Lock()

    def of(self, person: Person) -> Consent:
        """Return what a person allows. Until the log is read, named people count as refusing: they are answered, and nothing is stored."""
        if self._cursor is None:
            return Consent.YES if person[1] == ANONYMOUS else Consent.NEVER
        return self._levels.get(person, (Consent.YES, 0))[0]

    async def refresh(self) -> None:
        """Fold the log's new rows. Raises StorageFull, Unavailable."""
        async with self._turn:
            newest = await self._log.append()
            async for seq, row in self._log.read(self._cursor or 0, {ConsentGiven, Forgotten}):
                if isinstance(row, ConsentGiven):
                    self._levels[row.person] = row.level, seq
                elif isinstance(row, Forgotten):
                    self._forgotten(row)
                    await asyncio.sleep(0)  # lets calls be answered between many such rows
            self._cursor = newest

    async def add(self, person: Person, level: Consent, at: float) -> bool:
        """Record a choice that follows the last one known here. Return False, with nothing recorded, if another choice was recorded
        meanwhile: this one may have to be checked against that. Raises StorageFull, Unavailable.
        """
        id = choice_id(person, self._levels.get(person, (Consent.YES, 0))[1])
        row = ConsentGiven(id=id, tenant=person[0], user=person[1], level=level, at=at)
        await self._log.append(row)
        await self.refresh()
        return await self._log.find(ConsentGiven, [(id,)]) == [row]

    async def follow(self) -> None:
        """Poll the log until cancelled."""
        last_error = ""
        while True:
            try:
                await self.refresh()
                last_error = ""
            except Exception as error:  # noqa: BLE001 (the next poll may succeed, and nothing else polls)
                if last_error != repr(error):
                    _LOG.warning("People's consent choices cannot be read from the log: %r", error)
                last_error = repr(error)
            await asyncio.sleep(EVERY_S)


class _Wish(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    user: User
    train: str


class ConsentHandlers:
    """Handlers of `/v1/consent`. Anybody with the tenant's key may record a stricter choice for a user; a looser one needs the user's
    signature (`serve.user_keys`) or an operator's key.
    """

    def __init__(self, parts: Parts, choices: ConsentChoices) -> None:
        self._parts, self._choices = parts, choices

    async def tell(self, exchange: Exchange) -> None:
        """`GET /v1/consent`: return the choice of the user named in X-Ostinato-User."""
        who = self._parts.keys.identify(exchange.headers)
        self._parts.quotas.count_call(who.tenant)
        person = (who.tenant, named_user(exchange.text("X-Ostinato-User"), "X-Ostinato-User"))
        async with in_time(self._parts.config.store_timeout_s):
            await self._choices.refresh()
        await self._reply(exchange, person)

    async def record(self, exchange: Exchange) -> None:
        """`PUT /v1/consent`: record a user's choice, durable when answered. Raises BadRequest, Unauthorized, Unavailable."""
        parts, who = self._parts, self._parts.keys.identify(exchange.headers)
        parts.quotas.expect_events(who.tenant)  # before the body is read
        wish = validate(_Wish, await exchange.json(partial(parts.quotas.count_bytes, who.tenant)))
        parts.quotas.count_events(who.tenant, 1)
        person, level = (who.tenant, named_user(wish.user, "user")), read_level(wish.train, "train")
        async with in_time(self._parts.config.store_timeout_s):
            await self._choices.refresh()
            while (known := self._choices.of(person)) is not level:
                if Consent.strictest(known, level) is known:
                    self._check(exchange, who, wish.user)
                if await asyncio.shield(parts.writes.begin(self._choices.add(person, level, parts.clock()))):
                    break
        await self._reply(exchange, person)

    def _check(self, exchange: Exchange, who: Principal, user: str) -> None:
        """Raise Unauthorized unless the user (by signature) or an operator loosens the choice."""
        if who.admin:
            return
        signature = exchange.text("X-Ostinato-User-Signature")
        if signature is None:
            raise Unauthorized(
                "A looser choice than the recorded one needs the user's signature; send X-Ostinato-User-Signature (serve.user_keys), or "
                "have the operator record it with `ostinato consent`."
            )
        self._parts.users.check(who.tenant, user, signature, self._parts.clock())

    async def _reply(self, exchange: Exchange, person: Person) -> None:
        chosen = self._choices.of(person)
        applied = Consent.strictest(chosen, self._parts.privacy.at_most(person[0]))
        await exchange.reply(200, json_bytes({"user": person[1], "train": chosen, "applied": applied}))


def named_user(user: str | None, field: str) -> str:
    """Return the user's name. Raises BadRequest if it is missing or anonymous."""
    if not user or user == ANONYMOUS:
        raise BadRequest(f"{field} must name the user whose choice it is.", field=field)
    return user
