"""The copilot's tasks: small Python functions, in families, with hidden tests; read from the shipped `tasks.jsonl`.

In the data flow: simulated users ask for tasks of the users' families and grade the answers with the tests; the evaluation suite
is made of the held-out families, which no user ever asks for. The order is by popularity: families that come first, and tasks
that come first in a family, are asked for more often (they are also the easier ones). `tables.txt` is the source (name, arguments,
docstring, reference expression); `build` makes the shipped file from it, ``python -m ostinato.demo.tasks`` writes it.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadConfig
from ostinato.core.lines import lines_of, one_line
from ostinato.demo.pools import POOLS
from ostinato.demo.prompt import TaskPrompt

FILE = Path(__file__).with_name("tasks.jsonl")
TABLES = Path(__file__).with_name("tables.txt")
HELD_OUT_SHARE = 0.25
SPLIT_SALT = "24"  # chosen so that both sides are equally hard for the model that training starts from
MAX_TESTS = 7
SYSTEM = "Write Python."
STOP = ("\n\n", "\n```", "\ndef ", "\nprint", "\n#", "\nassert", "\nif ", "\nclass ", "\nfor ", "\nreturn")
MAX_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    r"""One function to write: the model sees `head`, the tests are hidden, `solution` is the reference body.

    Example::

        Blank(id="sorting/is_sorted", family="sorting", head='def is_sorted(numbers):\n    \"\"\"Return ...\"\"\"\n',
             solution="    return numbers == sorted(numbers)\n", tests="assert is_sorted([1, 2]) == True\n")
    """

    id: str
    family: str
    head: str
    solution: str
    tests: str

    @property
    def prompt(self) -> TaskPrompt:
        """The prompt for the function's body."""
        return TaskPrompt(messages=tuple(messages(self)), max_tokens=MAX_TOKENS, stop=STOP)

    def shows(self, text: str) -> bool:
        """True: the copilot shows every answer."""
        return True


def load(path: Path = FILE) -> list[Blank]:
    """The shipped tasks. Raises BadConfig if the file does not have the format that `build` writes."""
    try:
        return [Blank(**json.loads(line)) for line in lines_of(path.read_text(encoding="utf-8-sig"))]
    except (OSError, TypeError, ValueError) as error:
        raise BadConfig(f"demo tasks {path}: {error}; reinstall, or run `python -m ostinato.demo.tasks`") from error


def split(tasks: Sequence[Blank], share: float = HELD_OUT_SHARE) -> tuple[list[Blank], list[Blank]]:
    """(users' tasks, held-out tasks): whole families, chosen by the hash of their names, so that the choice never changes."""
    families = sorted(
        {task.family for task in tasks}, key=lambda name: hashlib.sha256(f"{SPLIT_SALT}/{name}".encode()).digest()
    )
    held = set(families[: math.ceil(share * len(families))])
    return [task for task in tasks if task.family not in held], [task for task in tasks if task.family in held]


def messages(task: Blank) -> list[dict[str, str]]:
    """The chat that asks for a task's body: the assistant's answer is prefilled with the head, and the model continues it.

    The head's last newline is left to the model: tokenizers join it with the indentation that follows.
    """
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Complete this function."},
        {"role": "assistant", "content": f"```python\n{task.head.rstrip()}"},
    ]


def suite_items(tasks: Iterable[Blank]) -> list[dict[str, Any]]:
    """Tasks as items of an evaluation suite: the same prompt and sampling that users send, graded by the hidden tests."""
    return [
        {
            "id": task.id,
            "family": task.family,
            "messages": messages(task),
            "continue_final_message": True,
            "sampling": {"max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0, "stop": list(STOP)},
            "grader": "python_tests",
            "head": task.head,
            "tests": task.tests,
        }
        for task in tasks
    ]


# ---------------------------------------------------------------- building the file from the tables


def literal(value: Any) -> str:
    """`repr`, but the same in every process: sets are written sorted."""
    if isinstance(value, set):
        return "{" + ", ".join(sorted(map(literal, value))) + "}" if value else "set()"
    return repr(value)


def arguments(kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    """Argument tuples from the pools: argument i strides its pool at its own pace, so that combinations vary."""
    picks: list[tuple[Any, ...]] = []
    for k in range(24):
        pick = tuple(POOLS[kind][(k * (i + 1) + i * (k // 3) + i) % len(POOLS[kind])] for i, kind in enumerate(kinds))
        if pick not in picks:
            picks.append(pick)
    return picks


def check(call: str, value: Any) -> str:
    """One assert; floats, also inside lists, are compared with a tolerance."""
    if isinstance(value, float):
        return f"assert abs({call} - {value!r}) < 1e-6\n"
    if isinstance(value, list) and any(isinstance(x, float) for x in value):
        return f"assert [round(x, 6) for x in {call}] == {[round(x, 6) for x in value]!r}\n"
    if isinstance(value, bool) or value is None:
        return f"assert {call} is {value!r}\n"
    return f"assert {call} == {literal(value)}\n"


def make_tests(name: str, source: str, picks: Sequence[tuple[Any, ...]]) -> str:
    """Asserts with the reference's own answers, preferring answers not seen yet; inputs that the reference refuses are left out."""
    space: dict[str, Any] = {}
    exec(source, space)
    fresh: list[str] = []
    repeated: list[str] = []
    seen: set[str] = set()
    for pick in picks:
        try:
            value = space[name](*copy.deepcopy(pick))
        except (ValueError, IndexError, TypeError, ZeroDivisionError, KeyError):
            continue
        line = check(f"{name}({', '.join(map(literal, pick))})", value)
        (repeated if literal(value) in seen else fresh).append(line)
        seen.add(literal(value))
    return "".join((fresh + repeated)[:MAX_TESTS])


def parse(line: str, family: str) -> Blank:
    """One table line, ``name(arg:kind, ...) ;; docstring ;; expression [;; argument tuples]``, as a task."""
    signature, doc, expression, *inputs = (part.strip() for part in line.split(" ;; "))
    found = re.fullmatch(r"(\w+)\((.*)\)", signature)
    if found is None:
        raise BadConfig(f"{TABLES.name}: {signature!r} is not name(arg:kind, ...)")
    name = found[1]
    pairs = [part.split(":") for part in found[2].split(", ")]
    head = f'def {name}({", ".join(pair[0] for pair in pairs)}):\n    """{doc}"""\n'
    solution = f"    return {expression}\n"
    picks = ast.literal_eval(inputs[0]) if inputs else arguments([pair[1] for pair in pairs])
    tests = make_tests(name, head + solution, picks)
    return Blank(id=f"{family}/{name}", family=family, head=head, solution=solution, tests=tests)


def build() -> str:
    """The text of `tasks.jsonl`."""
    tasks: list[Blank] = []
    family = ""
    for line in lines_of(TABLES.read_text(encoding="utf-8")):
        if line.startswith("# "):
            family = line[2:]
        elif line:
            tasks.append(parse(line, family))
    return "".join(one_line(json.dumps(asdict(task), ensure_ascii=False)) + "\n" for task in tasks)


if __name__ == "__main__":
    FILE.write_text(build(), encoding="utf-8")
