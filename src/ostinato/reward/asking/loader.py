"""Finds the reward function that the config names, and binds its options."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ostinato.core.errors import BadConfig
from ostinato.core.seams import RewardFn


def load(name: str, options: Mapping[str, Any] | None = None) -> RewardFn:
    """Import "module:function" and bind `options` to its keyword-only parameters, checked against their annotations.

    Importing runs the module's code: the name comes from the operator's config, never from a request.

    Raises:
        BadConfig: the name is malformed or names nothing callable, or an option is unknown, missing or of the wrong type.

    Example: ``load("ostinato.reward.functions:copilot", {"t": 0.25, "window": 30.0})``
    """
    function = _find(name)
    declared = {
        key: parameter
        for key, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    given = dict(options or {})
    for key in given:
        if key not in declared:
            raise BadConfig(f"reward.options.{key}: {name} has no such option; {_nearest(key, declared)}")
    for key, parameter in declared.items():
        if key in given:
            given[key] = _checked(name, key, given[key], parameter.annotation)
        elif parameter.default is inspect.Parameter.empty:
            raise BadConfig(f"reward.options.{key} is missing: {name} needs it")
    return partial(function, **given)


def _find(name: str) -> Callable[..., Any]:
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", name)
    if match is None:
        raise BadConfig(f"reward.function {name!r} must have the form 'module:function'")
    module_name, function_name = match.groups()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        remedy = "; start where its file is, or put that directory into PYTHONPATH" if missing else ""
        raise BadConfig(
            f"reward.function {name!r}: module {module_name} cannot be imported: {error}{remedy}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        public = [each for each, value in vars(module).items() if inspect.isfunction(value) and each[0] != "_"]
        raise BadConfig(f"reward.function {name!r}: no {function_name} in it; {_nearest(function_name, public)}")
    if not callable(function):
        raise BadConfig(f"reward.function {name!r} is a {type(function).__name__}, not a function")
    return function


def _checked(name: str, key: str, value: Any, annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise BadConfig(f"reward.options.{key} = {value!r} does not suit {name}: {why}") from error


def _nearest(key: str, known: Mapping[str, Any] | list[str]) -> str:
    close = get_close_matches(key, list(known), n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known)) or 'none'}"
