"""A person's dials and style over HTTP: `GET /v1/adaptation` shows them, `PUT` sets some by hand, `DELETE` resets all to the prior.

Only the person may see them: X-Ostinato-User names the user, and X-Ostinato-User-Signature proves the name, unless `adapt.users` gives
dials to declared names.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.errors import BadRequest, NotFound, OstinatoError, Unauthorized
from ostinato.core.records import Arm, Consent, Person
from ostinato.core.steering import MOST_SET, DialSet, NotSteered, PersonView, SetBy
from ostinato.serve.auth import Principal
from ostinato.serve.consent import ConsentChoices, named_user
from ostinato.serve.dialects.dialect import json_type, refusal
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.writes import in_time

if TYPE_CHECKING:
    from ostinato.serve.parts import Parts

_REFUSING = (NotSteered.TENANT, NotSteered.CONSENT)  # reasons for which nothing that a person sets may be stored


class DialsOff(OstinatoError):
    """This person may not set dials; the message says why, and who can change that."""

    status = 403
    code = "dials_off"


class PersonDialHandlers:
    """Handlers of `/v1/adaptation`."""

    def __init__(self, parts: Parts, choices: ConsentChoices) -> None:
        self._parts, self._choices = parts, choices

    async def show(self, exchange: Exchange) -> None:
        """`GET`: show what is known of the person, and how it affects their answers. Raises NotFound, Unauthorized, Unavailable."""
        who = self._parts.keys.identify(exchange.headers)
        self._parts.quotas.count_call(who.tenant)
        person = self._person(exchange, who)
        async with in_time(self._parts.config.store_timeout_s):
            view = await self._view(person, exchange)
        await self._reply(exchange, person, view)

    async def set(self, exchange: Exchange) -> None:
        """`PUT`: set dials by name; null resets one to the prior. Durable, and in effect on this gateway, when answered.

        Raises BadRequest, DialsOff, NotFound, Unauthorized, Unavailable.
        """
        parts, who = self._parts, self._parts.keys.identify(exchange.headers)
        parts.quotas.expect_events(who.tenant)  # before the body is read
        person = self._person(exchange, who)
        body = await exchange.json(partial(parts.quotas.count_bytes, who.tenant))
        parts.quotas.count_events(who.tenant, 1)
        async with in_time(self._parts.config.store_timeout_s):
            view = await self._view(person, exchange)
            for off in (view.off, None if view.styles is None else view.styles.off):
                if off is not None and off in _REFUSING:
                    raise DialsOff(f"Nothing was set: {off.words}.")
            if wish := self._wish(body, view):
                view = await self._record(person, wish, exchange)
        await self._reply(exchange, person, view)

    async def reset(self, exchange: Exchange) -> None:
        """`DELETE`: reset all dials to the prior; ratings so far no longer count. Raises NotFound, Unauthorized, Unavailable."""
        parts, who = self._parts, self._parts.keys.identify(exchange.headers)
        parts.quotas.count_events(who.tenant, 1)
        person = self._person(exchange, who)
        async with in_time(self._parts.config.store_timeout_s):
            view = await self._record(person, {}, exchange)
        await self._reply(exchange, person, view)

    def _person(self, exchange: Exchange, who: Principal) -> Person:
        """Return the person who asks; checks the signature if one is required. Raises BadRequest, NotFound, Unauthorized."""
        adaptation = self._parts.adaptation or self._parts.styles
        if adaptation is None:
            raise NotFound(
                "Nobody has dials on this server: adapt.mode is 'off'; the operator sets it to 'dials' and runs `ostinato adapt fit`."
            )
        user = named_user(exchange.text("X-Ostinato-User"), "X-Ostinato-User")
        signature = exchange.text("X-Ostinato-User-Signature")
        if signature is not None:
            self._parts.users.check(who.tenant, user, signature, self._parts.clock())
        elif adaptation.verified_only:
            raise Unauthorized(
                "A person's dials are shown and set with their signature only; send X-Ostinato-User-Signature (serve.user_keys), made by "
                "sign_user of ostinato_client on the product's server."
            )
        return who.tenant, user

    async def _view(self, person: Person, exchange: Exchange) -> PersonView:
        """Return the person's current dials and style, and whether the person and the operator allow them."""
        await self._choices.refresh()
        parts, slots = self._parts, self._parts.engine.slots()
        live, compared = slots.get(Arm.LIVE), parts.arms.compared(slots)
        allowed = Consent.strictest(self._choices.of(person), parts.privacy.at_most(person[0]))
        refused = allowed not in (Consent.ADAPT, Consent.YES)
        view, styles = PersonView(dials=(), scale=1.0, off=NotSteered.MODE), None
        if parts.styles is not None:
            signed = exchange.text("X-Ostinato-User-Signature") is not None
            named = signed or parts.config.arm_users == "declared"  # as in calls
            arm = parts.arms.assign(person[0], person[1] if named else ANONYMOUS, slots).arm
            policies = parts.arms.styled(person[0], arm, slots)
            styles = await parts.styles.shown(person, policies=policies, shared=arm is not Arm.BRANCH)
            if refused and styles.off is not NotSteered.TENANT:
                styles = replace(styles, off=NotSteered.CONSENT)
        if parts.adaptation is not None:
            view = await parts.adaptation.shown(person, weights="" if live is None else live.hash)
            if refused and view.off is not NotSteered.TENANT:
                view = replace(view, off=NotSteered.CONSENT)
            elif view.off is None and not parts.adaptation.fits(compared):
                view = replace(view, off=NotSteered.TRIAL)
        return replace(view, styles=styles)

    def _wish(self, body: Any, view: PersonView) -> dict[str, float | None]:
        """Return the dials to set, with the arms of styles; {} to release a style that is not set. Raises BadRequest."""
        names, styles = [dial.name for dial in view.dials], self._parts.styles
        if styles is None or not isinstance(body, dict) or "style" not in body:
            return _wish(body, names)
        given: dict[str, Any] = body  # pyright: ignore[reportUnknownVariableType]
        name, others = given["style"], {field: value for field, value in given.items() if field != "style"}
        if name is not None and (not isinstance(name, str) or name not in styles.arms):
            raise BadRequest(f"style takes one of {', '.join(styles.arms)}, or null to let it learn", field="style")
        held = None if view.styles is None else view.styles.held
        wish: dict[str, float | None] = {} if held is None else {styles.arms[held]: None}
        if name is not None:
            wish[styles.arms[name]] = 1.0
        return wish | (_wish(others, names) if others else {})

    async def _record(self, person: Person, dials: Mapping[str, float | None], exchange: Exchange) -> PersonView:
        parts, (tenant, user) = self._parts, person
        id = f"dials-{secrets.token_hex(16)}"
        row = DialSet(id=id, tenant=tenant, user=user, at=parts.clock(), by=SetBy.PERSON, dials=dials)
        await asyncio.shield(parts.writes.begin(parts.log.append(row)))
        return await self._view(person, exchange)

    async def _reply(self, exchange: Exchange, person: Person, view: PersonView) -> None:
        await exchange.reply(200, json_bytes({"user": person[1], **view.to_json()}))


def _wish(body: Any, names: list[str]) -> dict[str, float | None]:
    """Return the dials to set. Raises BadRequest naming every invalid dial."""
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object of dials, not {json_type(body)}.")
    given: dict[str, Any] = body  # pyright: ignore[reportUnknownVariableType]
    if not names:
        raise NotFound(f"There are no dials yet: {NotSteered.BASIS.words}.")
    if not given:
        raise BadRequest(f"Name a dial to set ({', '.join(names)}); DELETE returns all of them to the prior.")
    wrong: dict[str, str] = {}
    for name, value in given.items():
        if name not in names:
            wrong[name[:60]] = (
                f"there is no dial {name[:60]!r} in the basis that is used now; it has {', '.join(names)}"
            )
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            wrong[name] = f"{name} takes a number from {-MOST_SET:g} to {MOST_SET:g}, or null, not {json_type(value)}"
        elif value is not None and not abs(value) <= MOST_SET:
            wrong[name] = f"{name} takes a number from {-MOST_SET:g} to {MOST_SET:g}, or null to return it to the prior"
    if wrong:
        raise refusal(wrong)
    return given
