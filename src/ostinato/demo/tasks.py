"""Tasks of the demo's code copilot: small Python functions with hidden tests, grouped in families; read from the shipped `tasks.jsonl`.

Simulated users ask for tasks of the users' families and grade the answers with the hidden tests. The evaluation suite has the held-out
families, which no user asks for. The order is by popularity: earlier families, and earlier tasks in a family, are requested more often
(and are easier). `tables.txt` is the source (name, arguments, docstring, reference expression): `build` generates the shipped file from
it, and ``python -m ostinato.demo.tasks`` writes it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompt:
    r"""A task's prompt: the model continues the text of the last message, up to `stop`.

    Example::

        TaskPrompt(messages=({"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}), max_tokens=4,
               stop=(",", "\n"))
    """

    messages: tuple[dict[str, str], ...]
    max_tokens: int
    stop: tuple[str, ...]


FILE = Path(__file__).with_name("tasks.jsonl")
TABLES = Path(__file__).with_name("tables.txt")
HELD_OUT_SHARE = 0.25
SPLIT_SALT = "24"  # chosen so that both sides are equally hard for the base model
MAX_TESTS = 7
SYSTEM = "Write Python."
STOP = ("\n\n", "\n```", "\ndef ", "\nprint", "\n#", "\nassert", "\nif ", "\nclass ", "\nfor ", "\nreturn")
MAX_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    r"""A function to complete: the model sees `head`; `tests` are hidden; `solution` is the reference body.

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
        """Return True: the copilot shows every answer."""
        return True


def load(path: Path = FILE) -> list[Blank]:
    """Read the shipped tasks. Raises BadConfig if the file does not have the format that `build` writes."""
    try:
        return [Blank(**json.loads(line)) for line in lines_of(path.read_text(encoding="utf-8-sig"))]
    except (OSError, TypeError, ValueError) as error:
        raise BadConfig(f"demo tasks {path}: {error}; reinstall, or run `python -m ostinato.demo.tasks`") from error


def split(tasks: Sequence[Blank], share: float = HELD_OUT_SHARE) -> tuple[list[Blank], list[Blank]]:
    """Split into (users' tasks, held-out tasks) by whole families, chosen by a hash of their names, so that the split never changes."""
    families = sorted(
        {task.family for task in tasks}, key=lambda name: hashlib.sha256(f"{SPLIT_SALT}/{name}".encode()).digest()
    )
    held = set(families[: math.ceil(share * len(families))])
    return [task for task in tasks if task.family not in held], [task for task in tasks if task.family in held]


def messages(task: Blank) -> list[dict[str, str]]:
    """Return the chat for a task: the assistant's answer is prefilled with the function's head, and the model continues it.

    The head's last newline is left to the model, since tokenizers merge it with the indentation that follows.
    """
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Complete this function."},
        {"role": "assistant", "content": f"```python\n{task.head.rstrip()}"},
    ]


def suite_items(tasks: Iterable[Blank]) -> list[dict[str, Any]]:
    """Return tasks as items of an evaluation suite, with the prompts and sampling of users, graded by the hidden tests."""
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


# Arguments of the hidden tests, by the argument kinds of `tables.txt`.
WORDS = ["apple", "Banana", "kiwi", "level", "Hello", "noon", "Zebra", "xyz", "Otto"]

POOLS: dict[str, list[Any]] = {
    "int": [3, -4, 0, 10, 7, -1, 12, 5, 100, -25, 8],
    "pos": [4, 3, 10, 7, 1, 12, 25, 2, 16, 100],
    "small": [2, 5, 3, 1, 4, 9, 6],
    "tiny": [3, 0, 1, 5, 2, 6, 4],
    "zero": [0, 2, 1, 3, 0, 4],
    "one": [0, 1, 1, 0],
    "ten": [10, 5, 9, 8],
    "eight": [8, 6, 7],
    "hundred": [100, 40, 75, 50, 20],
    "large": [1234, 7, 505, 90, 1000000, 4321, 99, 12321],
    "num": [2, 1.5, -3, 10, 0, 0.25, 100, -7.5],
    "fraction": [3.14159, 2.5, 0.126, -1.239, 10.0],
    "percent": [10, 25, 50, 5, 20],
    "scores": [75, 50, 20, 49, 26, 100, 0],
    "ages": [12, 17, 18, 35, 20, 5, 13, 80],
    "angle": [60, 90, 45, 30, 72],
    "bool": [True, False, False, True, True],
    "maybe": [5, None, 0, -2, None],
    "word": WORDS,
    "thing": ["cat", "a", "book", "sun", "tree"],
    "cased": ["Hello", "HELLO", "hello", "PyThOn", "A", "x"],
    "mixed": ["abc123", "42", "hello", "a1b2c3", "7", "Room 5"],
    "text": ["hello world", "The quick brown fox", "one", "a b c a", "Python  is fun ", " good day"],
    "char": ["a", "l", "o", "z", "e", "i"],
    "letter": ["a", "x", "e", "b", "o", "k"],
    "ints": [[1, 2, 3], [4, -2, 9, 0], [7, 7, 3, 7], [], [5], [10, 20, 15, 40], [-5, -1, -3], [2, 4, 6, 8, 1, 4]],
    "poss": [[1, 2, 3], [4, 10], [7, 7, 3, 7], [5], [10, 20, 30, 40], [8, 6, 1]],
    "odd": [[3, 1, 2], [5], [9, 4, 7, 1, 8], [10, 30, 20]],
    "nums": [[1, 2, 3], [1.5, 2.5], [], [10], [0.25, 4, 5.75]],
    "triple": [[1, 2, 3], [4, 0, -1], [10, 20, 30], [7, 8, 9], [2, 2, 5]],
    "modal": [[1, 2, 2], [5], ["a", "b", "a"], [3, 3, 3, 1], [7, 9, 9, 9, 7]],
    "holes": [[1, None, 2], [None], [], ["a", 0, None], [3, 4], [False, None]],
    "grades": [[50, 60], [80, 49], [100], [20, 30], [75, 51, 99]],
    "strs": [
        ["apple", "fig", "banana"],
        ["a"],
        ["dog", "cat", "horse"],
        ["kiwi", "", "pear", "plum"],
        [],
        ["Zoe", "adam"],
    ],
    "names": [["Tom", "anna", "Bob"], ["kim", "Lea", "jo"], ["Zed", "amy", "Carl"], ["Max", "Ida", "Noah"]],
    "table": [
        {"a": 1, "b": 2},
        {"x": 5, "b": -3},
        {},
        {"tom": 30, "ann": 25, "bob": 28},
        {"b": 0, "m": -3, "z": 9},
        {"a": 4},
    ],
    "unique": [{"b": 7, "c": 8}, {"x": 1}, {}, {"one": 1, "two": 2, "three": 3}],
    "key": ["b", "a", "x", "b", "m"],
    "set": [{1, 2, 3}, {5}, set(), {1, 9, 10}, {2, 4, 6, 7}],
    "other": [{2, 3, 4}, {6, 7}, {1}, {9, 10}, {4, 6}, {1, 2}],
    "pair": [(1, 2), (5, 3), (0, 0), (-4, 7), (10, -2)],
    "point": [(3, 4), (0, 1), (-2, 5), (7, 7)],
    "pairs": [[("a", 1), ("b", 2)], [("x", 5)], [], [("k", 0), ("m", 7), ("n", -2)]],
    "matrix": [[[1, 2], [3, 4]], [[5]], [[1, 2, 3], [4, 5, 6]], [[0, -1], [7, 2], [3, 3]]],
    "square": [[[1, 2], [3, 4]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[0, 5], [-1, 2]], [[9, 8], [7, 6]]],
    "year": [2024, 1999, 1900, 2000, 2023, 1876],
    "later": [2030, 2025, 2024, 2050],
    "month": [5, 12, 1, 10],
    "day": [7, 31, 15, 2],
    "hour": [9, 0, 12, 23, 5, 18],
    "minute": [5, 30, 0, 59],
    "secs": [59, 60, 125, 3600, 0, 7325],
    "weekday": ["Saturday", "Monday", "Sunday", "Friday"],
    "digits": ["42", "7", "1234", "005"],
    "csv": ["a,b,c", "one", "x,y", "red,green,blue,black"],
    "csvints": ["1,2,3", "10", "4,-5", "7,0,7,1"],
    "email": ["ann@site.org", "bob@mail.com", "x.y@z.net"],
    "file": ["notes.txt", "photo.old.png", "main.py"],
    "path": ["/usr/bin/python", "docs/readme.md", "/tmp/a/b"],
    "clock": ["12:45", "09:05", "23:59", "00:30"],
    "keyvalue": ["name=Bob", "x=1", "color=red"],
    "truth": ["yes", "No", "TRUE", "false", "Yes", "maybe"],
    "date": ["2024-05-17", "1999-12-31", "2010-01-01"],
    "binary": ["101", "1", "11111", "1000"],
    "hex": ["ff", "1a", "7", "100"],
}


def literal(value: Any) -> str:
    """Return `repr`, with sets sorted so that it is the same in every process."""
    if isinstance(value, set):
        return "{" + ", ".join(sorted(map(literal, value))) + "}" if value else "set()"
    return repr(value)


def arguments(kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return distinct argument tuples from the pools. Each argument uses another stride, so that combinations vary."""
    picks: list[tuple[Any, ...]] = []
    for k in range(24):
        pick = tuple(POOLS[kind][(k * (i + 1) + i * (k // 3) + i) % len(POOLS[kind])] for i, kind in enumerate(kinds))
        if pick not in picks:
            picks.append(pick)
    return picks


def check(call: str, value: Any) -> str:
    """Return one assert statement. Floats, also in lists, are compared with a tolerance."""
    if isinstance(value, float):
        return f"assert abs({call} - {value!r}) < 1e-6\n"
    if isinstance(value, list) and any(isinstance(x, float) for x in value):
        return f"assert [round(x, 6) for x in {call}] == {[round(x, 6) for x in value]!r}\n"
    if isinstance(value, bool) or value is None:
        return f"assert {call} is {value!r}\n"
    return f"assert {call} == {literal(value)}\n"


def make_tests(name: str, source: str, picks: Sequence[tuple[Any, ...]]) -> str:
    """Return assert statements with the reference's answers, distinct answers first. Inputs for which the reference raises are left out."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    fresh: list[str] = []
    repeated: list[str] = []
    seen: set[str] = set()
    for pick in picks:
        try:
            value = namespace[name](*copy.deepcopy(pick))
        except (ValueError, IndexError, TypeError, ZeroDivisionError, KeyError):
            continue
        line = check(f"{name}({', '.join(map(literal, pick))})", value)
        (repeated if literal(value) in seen else fresh).append(line)
        seen.add(literal(value))
    return "".join((fresh + repeated)[:MAX_TESTS])


def parse(line: str, family: str) -> Blank:
    """Parse one table line, ``name(arg:kind, ...) ;; docstring ;; expression [;; argument tuples]``, into a task. Raises BadConfig."""
    signature, doc, expression, *inputs = (part.strip() for part in line.split(" ;; "))
    match = re.fullmatch(r"(\w+)\((.*)\)", signature)
    if match is None:
        raise BadConfig(f"{TABLES.name}: {signature!r} is not name(arg:kind, ...)")
    name = match[1]
    pairs = [part.split(":") for part in match[2].split(", ")]
    head = f'def {name}({", ".join(pair[0] for pair in pairs)}):\n    """{doc}"""\n'
    solution = f"    return {expression}\n"
    picks = ast.literal_eval(inputs[0]) if inputs else arguments([pair[1] for pair in pairs])
    tests = make_tests(name, head + solution, picks)
    return Blank(id=f"{family}/{name}", family=family, head=head, solution=solution, tests=tests)


def build() -> str:
    """Return the text of `tasks.jsonl`."""
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
