"""What the scrubber finds of secrets and personal data that others' rules describe, what it takes wrongly, and what it costs a call.

    pip install --target SITE faker rstr detect-secrets
    python -m benchmarks.serving.scrub --site SITE --gitleaks gitleaks.toml    # config/gitleaks.toml of gitleaks' repository

No value comes from our own expressions: secrets are drawn at random from the regular expressions of gitleaks and detect-secrets (rstr),
personal data from Faker in seven languages. Each stands in prose, and in code. A rule that knows a secret by the name of a service beside
it is counted apart. False alarms: what is found in Python files of this environment's packages, e-mail addresses apart, which are real.
Writes benchmarks/results/scrub.json.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import pkgutil
import random
import re
import statistics
import sys
import sysconfig
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.contender import RESULTS, machine

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.serve.config import PrivacyConfig
from ostinato.serve.scrub import Scrubbing
from ostinato.serve.secret_detector import SecretDetector

EACH = 10  # values of a rule or kind
PROSE = "Please look at the report, because the total of 1,482 in the second row does not match. {} Version 3.11.7 was released in May."
CODE = 'def total(rows):\n    """See https://example.com/docs ."""\n    value = "{}"\n    return sum(row["amount"] for row in rows)\n'
LOCALES = ("en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "it_IT", "pt_BR")
KINDS: dict[str, Callable[[Any], str]] = {
    "email": lambda fake: fake.email(),
    "phone": lambda fake: fake.phone_number(),
    "card": lambda fake: fake.credit_card_number(),
    "iban": lambda fake: fake.iban(),
    "national id": lambda fake: fake.ssn(),
    "ipv4": lambda fake: fake.ipv4_public(),
    "ipv6": lambda fake: fake.ipv6(),
    "password in a sentence": lambda fake: f"my password is {fake.password(length=12)}",
    "password in a URL": lambda fake: (
        f"postgres://app:{fake.password(length=12, special_chars=False)}@db.example.com/x"
    ),
}


def rules(gitleaks: Path) -> Iterator[tuple[str, str, str]]:
    """The rules of gitleaks and of detect-secrets: a group, a name, an expression in Python's syntax."""
    for rule in tomllib.loads(gitleaks.read_text())["rules"]:
        if "regex" in rule:
            near = rule["regex"].startswith(r"(?i)[\w.-]{0,50}?")
            group = "gitleaks, by a name beside it" if near else "gitleaks, by its own form"
            yield group, rule["id"], rule["regex"].replace(r"\z", r"\Z").replace("[[:alnum:]]", "[A-Za-z0-9]")
    package = importlib.import_module("detect_secrets.plugins")
    for module in pkgutil.iter_modules(package.__path__):
        for name, plugin in vars(importlib.import_module(f"detect_secrets.plugins.{module.name}")).items():
            denied = getattr(plugin, "denylist", None) if isinstance(plugin, type) else None
            if isinstance(denied, (list, tuple)) and name not in ("KeywordDetector", "IPPublicDetector"):
                yield from (("detect-secrets", f"{name} {n}", each.pattern) for n, each in enumerate(denied))


def values(expression: str, rng: random.Random) -> list[str]:
    """Random texts that an expression matches; none if Python does not read it."""
    rstr = importlib.import_module("rstr").Rstr(rng)
    flags = re.IGNORECASE if "(?i" in expression else 0
    plain = re.sub(
        r"\(\?[is-]+\)|\(\?(?:-i|i|i-s|s):", lambda found: "(?:" if found[0].endswith(":") else "", expression
    )
    found: list[str] = []
    for _ in range(20 * EACH):
        try:
            text = rstr.xeger(plain)
            match = re.search(plain, text, flags)
        except (re.error, ValueError, KeyError, TypeError, IndexError):  # an expression of another syntax
            return []
        if match is not None and text.isprintable() and len(found) < EACH:
            found.append(text.strip())
    return found


def share(detector: SecretDetector, texts: list[str]) -> tuple[int, int]:
    """How many of the texts, each in prose and in code, hold a finding of eight bytes or half of the text at least; and how many are."""
    hit = 0
    for text in texts:
        for frame in (PROSE, CODE):
            data = frame.replace("{}", text).encode()
            least = min(8, len(text) // 2)
            clean = {data[each.start : each.end] for each in detector.find(frame.replace("{}", "").encode())}
            found = (data[each.start : each.end] for each in detector.find(data))
            hit += any(each not in clean and len(each) >= least for each in found)
    return hit, 2 * len(texts)


def coverage(args: argparse.Namespace, detector: SecretDetector) -> dict[str, Any]:
    rng, table = random.Random(0), dict[str, dict[str, tuple[int, int]]]()
    for group, name, expression in rules(args.gitleaks):
        if texts := values(expression, rng):
            table.setdefault(group, {})[name] = share(detector, texts)
        else:
            table.setdefault("not drawn", {})[f"{group}: {name}"] = (0, 0)
    faker = importlib.import_module("faker").Faker
    for locale in LOCALES:
        fake = faker(locale)
        fake.seed_instance(0)
        for kind, draw in KINDS.items():
            hit, of = share(detector, [draw(fake) for _ in range(3 * EACH)])
            before = table.setdefault("Faker", {}).get(kind, (0, 0))
            table["Faker"][kind] = (before[0] + hit, before[1] + of)
            if kind in ("phone", "national id"):
                table["Faker"][f"{kind} {locale}"] = (hit, of)
    return table


def false_alarms() -> dict[str, Any]:
    """What is found in this environment's Python files, and milliseconds of processor time for a KB of them."""
    detector, counts, size = SecretDetector(("IP",)), collections.Counter[str](), 0
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(0).shuffle(files)
    took = 0.0
    for file in files[:2500]:
        data = file.read_bytes()
        began = time.thread_time()
        counts.update(each.kind for each in detector.find(data))
        took += time.thread_time() - began
        size += len(data)
    per_mb = {kind: round(count / (size / 1e6), 3) for kind, count in counts.most_common()}
    return {"mb": round(size / 1e6, 1), "per_mb": per_mb, "ms_per_kb": round(1e3 * took / (size / 1024), 4)}


def in_the_path(calls: int = 400) -> dict[str, Any]:
    """Milliseconds of processor time that masking adds to a call of 8k tokens (32 KB in 40 messages, ten values in them)."""
    lines = (CODE.replace("{}", "x") * 8)[:800]
    said = [lines + (f" mail{n}@example.com" if n % 4 == 0 else "") for n in range(40)]
    told = Conversation(messages=tuple(Message(role=Role.USER, text=text) for text in said))
    scrubbing, took = Scrubbing(PrivacyConfig(scrub="mask"), b"0123456789abcdef"), list[float]()
    for _ in range(calls):
        began = time.thread_time()
        scrubbing.person("acme", "ann").conversation(told).compute_digests()
        took.append(1e3 * (time.thread_time() - began))
    ranks = {"first": took[0], "p50": statistics.median(took), "p99": sorted(took)[int(0.99 * calls)]}
    return {name: round(value, 3) for name, value in ranks.items()} | {"chars": told.chars}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="where faker, rstr and detect-secrets are installed")
    parser.add_argument("--gitleaks", type=Path, required=True, help="gitleaks' config/gitleaks.toml")
    args = parser.parse_args()
    sys.path.append(str(args.site))
    warnings.simplefilter("ignore")
    table = coverage(args, SecretDetector())
    for group, found in table.items():
        hit, of = (sum(each[n] for each in found.values()) for n in (0, 1))
        print(f"{group}: {len(found)} rules or kinds, {hit} of {of}")
        for name, (hit, of) in found.items():
            if hit < of:
                print(f"    {name}: {hit} of {of}")
    alarms, path = false_alarms(), in_the_path()
    print(alarms, path, sep="\n")
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine(), "found": table, "false_alarms": alarms, "path": path}
    (RESULTS / "scrub.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
