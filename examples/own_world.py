"""A world of your own: the model guesses a number. `play` is the environment, `TEST` the grader, the rest writes the task set.

python examples/own_world.py > guess.jsonl
ostinato worlds run guess.jsonl --set 'worlds.harness.agent.command=["python3", "own_world.py", "{base_url}"]'
Needs nothing but ostinato: `worlds run` puts this file into each task's sandbox, where only the model can be reached.
"""

import json
import random
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

GUESSES = 7
RULES = "I think of a number from 1 to 100. Guess it; I say higher or lower. Answer with the number alone."
TEST = "mkdir -p /logs/verifier && cp score /logs/verifier/reward.txt"  # runs on what the rollout left: a number from 0 to 1


def ask(url: str, messages: list[dict[str, str]]) -> str:
    """The model's answer. Ostinato sets the sampling, the episode and the limits, whatever is sent here."""
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def play(url: str, secret: int) -> float:
    """One episode; an early hit scores more."""
    messages = [{"role": "user", "content": RULES}]
    for guess in range(GUESSES):
        said = ask(url, messages)
        number = int(found[0]) if (found := re.search(r"\d{1,3}", said)) else 0
        if number == secret:
            return 1.0 - guess / GUESSES
        hint = "Higher." if number < secret else "Lower."
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    return 0.0


def task(number: int) -> dict[str, Any]:
    """One line of the task set; every fourth task is held out."""
    files = {"own_world.py": Path(__file__).read_text(), "secret": str(random.Random(number).randint(1, 100))}
    return {
        "id": f"guess-{number}", "family": "guess", "split": "train" if number % 4 else "held_out", "harness": "agent",
        "turns": GUESSES, "tokens": 16, "messages": [{"role": "user", "content": RULES}], "world": {"files": files},
        "grading": {"grader": "harbor", "hidden": {"tests/test.sh": TEST}},
    }  # fmt: skip


if len(sys.argv) > 1:
    Path("score").write_text(str(play(sys.argv[1], int(Path("secret").read_text()))))
else:
    print("\n".join(json.dumps(task(number)) for number in range(40)))
