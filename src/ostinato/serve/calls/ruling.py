"""The operator's sampling rules, which override the client's parameters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ostinato.core.records import Sampling
from ostinato.serve.calls.sender import Caller
from ostinato.serve.config import SamplingRule

OTHERS = "*"


def ruled(asked: Sampling, caller: Caller, rules: Mapping[str, SamplingRule]) -> tuple[Sampling, str]:
    """The sampling parameters for this caller, and the overridden ones as a header's value ("" if there are none).

    A caller that names a slot is measuring, so its parameters are not overridden.

    Example: ``ruled(Sampling(max_tokens=9, temperature=0.0), ann, {"*": SamplingRule(temperature=1.0)})[1] == "temperature=1"``
    """
    rule = rules.get(caller.tenant, rules.get(OTHERS))
    if rule is None or caller.slot is not None:
        return asked, ""
    changed = {name: value for name, value in rule if value is not None and value != getattr(asked, name)}
    return replace(asked, **changed), ", ".join(f"{name}={value:g}" for name, value in changed.items())
