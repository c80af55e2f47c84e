"""Import of a function named by a setting as ``module:function``, from the operator's own code."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from ostinato.core.errors import BadConfig


def find_function(key: str, name: str) -> Callable[..., Any]:
    """Import and return the function. `key` is the setting, for error messages.

    Raises:
        BadConfig: the name has another form, the module cannot be imported, or has no such function.

    Example: ``find_function("reward.function", "ostinato.reward.functions:copilot")``
    """
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", name)
    if match is None:
        raise BadConfig(f"{key} {name!r} must have the form 'module:function'")
    module_name, function_name = match.groups()
    if os.getcwd() not in sys.path:  # workers have it there, a console script does not
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        remedy = "; start where its file is, or put that directory into PYTHONPATH" if missing else ""
        raise BadConfig(f"{key} {name!r}: module {module_name} cannot be imported: {error}{remedy}") from error
    function = getattr(module, function_name, None)
    if function is None:
        package = module_name.partition(".")[0]  # leave out functions that the module imports from elsewhere
        own = [(each, value) for each, value in vars(module).items() if inspect.isfunction(value) and each[0] != "_"]
        public = [each for each, value in own if value.__module__.partition(".")[0] == package]
        raise BadConfig(f"{key} {name!r}: no {function_name} in it; {did_you_mean(function_name, public)}")
    if not callable(function):
        raise BadConfig(f"{key} {name!r} is a {type(function).__name__}, not a function")
    return function


def did_you_mean(name: str, known: list[str]) -> str:
    """Suggest the closest known name, or list all, as the end of an error message. Example: "did you mean window?"."""
    close = get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known)) or 'none'}"
