"""docs/models.md from tests/examinations/results/architectures.json: `python -m tests.examinations.architectures.table`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "tests" / "examinations" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "models.md"
_PREFIX = re.compile(r"^(?:config\.json: |models of type '[^']*' are not supported: )")
_SUFFIX = "; the table of models in the documentation says which are supported"
_INTRODUCTION = """\
This page lists which architectures can be served and trained. The name is `model_type` in a model's `config.json`. The
weights must be in safetensors, in bf16, fp16 or fp32, beside a tokenizer.

A model newer than this table is right or refused, because the same check is made before an architecture's weights are
first used: transformers and Ostinato both compute a small copy of the model, and what differs is refused by name."""


def page(report: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    found: list[dict[str, Any]] = report["architectures"]
    equal = [each["kind"] for each in found if each["state"] == "equal"]
    totals = ", ".join(f"{count} {state}" for state, count in report["totals"].items())
    rest = [each for each in found if each["state"] != "equal"]
    lines = [
        "# Models",
        "",
        _INTRODUCTION,
        "",
        "`python -m tests.examinations.architectures.table` makes this page from the results of",
        "`python -m tests.examinations.architectures.run`. That command tries every causal language model of transformers",
        f"{report['transformers']} (torch {report['torch']}), tiny and random, in fp32:",
        f"{totals}. Equal means logits within 0.0001 of the largest one. A name with a comma is an architecture",
        "with a setting that gives another result than the setting tried under its name alone.",
        "",
        "## Supported",
        "",
        ", ".join(f"`{kind}`" for kind in equal),
        "",
        "## Not supported",
        "",
        "| model type | why |",
        "|---|---|",
        *(f"| `{each['kind']}` | {_why(each)} |" for each in rest if each["state"] != "untried"),
        "",
        "## Not tried",
        "",
        "The command makes no tiny model of these. They are checked at load like all others.",
        "",
        ", ".join(f"`{each['kind']}`" for each in rest if each["state"] == "untried"),
    ]
    return "\n".join(lines) + "\n"


def _why(outcome: Mapping[str, Any]) -> str:
    reason = _PREFIX.sub("", str(outcome["reason"])).removesuffix(_SUFFIX)
    if outcome["state"] != "refused":
        reason = f"**{outcome['state']}** {reason}".strip()
    return reason.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULT.read_text())))
