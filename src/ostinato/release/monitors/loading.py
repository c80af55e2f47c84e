"""The rates that the settings ask for: the built-in ones that are not switched off, and the operator's own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import cast

from ostinato.core.errors import BadConfig
from ostinato.release.monitors.rates import BUILT_IN, Rate, RateFn, Shift


def rates_of(off: Iterable[str], own: Mapping[str, str]) -> tuple[Rate, ...]:
    """The rates to watch. `own` maps a name to "module:function", whose function takes a `TurnText` and answers in [0, 1] or None.

    Importing runs the module's code: the name comes from the operator's config, never from a request. The function runs in the
    release worker for each turn; it must terminate. A shift of its rate in either direction pauses shipping.

    Raises:
        BadConfig: an unknown name is switched off, a name is taken, or a place names nothing callable.

    Example: ``rates_of(["praise"], {"emoji": "ours.rates:emoji"})``
    """
    silent = set(off)
    for name in silent - BUILT_IN.keys():
        close = get_close_matches(name, list(BUILT_IN), n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(BUILT_IN)}"
        raise BadConfig(f"release.monitors.off: there is no rate {name!r}; {hint}")
    found = [rate for name, rate in BUILT_IN.items() if name not in silent]
    for name, place in own.items():
        if name in BUILT_IN or name == "reference" or not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name):
            raise BadConfig(f"release.monitors.own.{name}: choose a plain lower-case name that no built-in rate has")
        found.append(Rate(name=name, measure=_find(name, place), harmful=frozenset(Shift), means=f"what {place} says"))
    return tuple(found)


def _find(name: str, place: str) -> RateFn:
    key = f"release.monitors.own.{name}"
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", place)
    if match is None:
        raise BadConfig(f"{key} = {place!r} must have the form 'module:function'")
    try:
        module = importlib.import_module(match[1])
    except ImportError as error:
        raise BadConfig(f"{key} = {place!r}: module {match[1]} cannot be imported: {error}") from error
    function = getattr(module, match[2], None)
    if not callable(function):
        raise BadConfig(f"{key} = {place!r}: there is no function {match[2]} in {match[1]}")
    return cast("RateFn", function)
