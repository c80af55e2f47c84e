"""The effect of people's dials, for an operator: people with dials compared with the holdout, and how their dials are distributed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.release.monitors.dial_effect import DialEffect
from ostinato.status.arms import windows
from ostinato.status.progress_lines import newest_line
from ostinato.status.run_report import Curve
from ostinato.status.summary import RatedTurn, Summary

DIALS, HOLDOUT = "dials", "holdout"
"""The names of the curves of the two sides."""
UNFITTED = (
    "the live version has no basis, so nobody's answers lean: run `ostinato adapt fit` with the run's settings beside it, and after each "
    "release"
)
REFUSED = (
    "the gateway does not use the live version's basis, which moves protected tokens (adapt.protected), so nobody's answers lean: run "
    "`ostinato adapt fit` again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialsNow:
    """The dials of a run whose `adapt.mode` is not off.

    `fitted`: the live version has a basis that the gateway uses; `refused`: it has one that the gateway does not use. `effect`: None before
    the first turn that counts. `curves`: acceptance of both sides over the newest rated turns, in minutes since `since`. `spread`: {dial:
    quantiles 10, 25, 50, 75 and 90%} over `people` people, empty if there are too few; `resets`: how often people reset their dials.
    """

    fitted: bool
    effect: DialEffect | None
    curves: tuple[Curve, ...] = ()
    since: float | None = None
    spread: Mapping[str, Sequence[float]]
    people: int = 0
    resets: int = 0
    refused: bool = False

    @property
    def missing(self) -> str:
        """Why nobody's answers are steered, with the remedy; "" if the live version has a basis that is used."""
        return "" if self.fitted else REFUSED if self.refused else UNFITTED


class DialRules(Protocol):
    """The settings of `adapt` that are used here. `mode` "off": nobody has dials. `holdout`: the share of people held out. `without`: the
    tenants whose people have no dials.
    """

    @property
    def mode(self) -> str: ...
    @property
    def holdout(self) -> float: ...
    @property
    def without(self) -> Collection[str]: ...


def refused_bases(serve: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the hashes of the weights whose basis the gateway does not use, from the serving worker's newest lines."""
    told = newest_line(serve, "bases") or {}
    return frozenset(map(str, told.get("refused", ())))


def dials_now(rules: DialRules, seen: Summary, live: str | None, serve: Sequence[Mapping[str, Any]]) -> DialsNow | None:
    """Return the state of the dials; None if they are off. `live`: the live version's hash. `serve`: the serving worker's newest lines."""
    if rules.mode == "off":
        return None
    told = newest_line(serve, "dials") or {}
    refused, dealt = live in refused_bases(serve), [each for each in seen.rated if each.served.dealt is not None]

    def side(each: RatedTurn) -> str:
        return HOLDOUT if (each.served.dealt or 0.0) < rules.holdout else DIALS

    drawn = windows(dealt, name=side)
    return DialsNow(
        fitted=live in seen.dials.bases and not refused,
        refused=refused,
        effect=seen.dials.effect(rules.holdout, rules.without),
        curves=drawn.curves,
        since=drawn.start,
        spread=told.get("dials", {}),
        people=told.get("people", 0),
        resets=told.get("resets", 0),
    )


def effect_sentence(found: DialsNow) -> str:
    """Describe the effect in one sentence, with its interval or what is missing for it.

    Example: "people with dials accept 62.0%, the holdout 55.0%: +7.0 pp, 95% [+1.2, +12.8]"
    """
    effect = found.effect
    if effect is None or effect.accepted is None or effect.held is None:
        return found.missing or "nothing to compare yet"
    words = f"people with dials accept {100 * effect.accepted:.1f}%, the holdout {100 * effect.held:.1f}%"
    if effect.lower is None or effect.upper is None:
        sides = f"{effect.people} with dials, {effect.holdout} held out"
        return f"{words}; too few people for an interval ({sides}; about 40 on each side are needed)"
    return f"{words}: {100 * effect.difference:+.1f} pp, 95% [{100 * effect.lower:+.1f}, {100 * effect.upper:+.1f}]"


def dials_line(found: DialsNow) -> str:
    """Describe the dials in one line, for a terminal."""
    effect, words = found.effect, effect_sentence(found)
    if effect is None:
        return f"dials: {words}"
    words += f"; {effect.leaning} of {effect.people} people lean, {effect.holdout} held out"
    words += f"; {effect.token_kl:.3f} nats a token, {100 * effect.spent:.0f}% of an answer's budget"
    words += f"; {found.resets} resets" if found.people else ""
    return f"dials: {words}{''.join(f'; {each}' for each in cautions(found))}"


def cautions(found: DialsNow) -> list[str]:
    """Return what an operator must know before trusting the difference."""
    effect = found.effect
    sentences = [] if found.fitted or effect is None or effect.accepted is None else [found.missing]
    if effect is not None and effect.mixed:
        sentences.append(
            f"{effect.mixed} people of the holdout had dials before adapt.holdout was raised: the difference is too small until both "
            "sides are counted anew, within four weeks"
        )
    if effect is not None and effect.full:
        sentences.append("not all people are counted: the 10,000 who came first in each two weeks")
    return sentences
