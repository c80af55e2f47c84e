"""Tasks of the demo's tab completion: short lists that a simulated user types, in families with a predictable or a random next item.

A simulated user asks for the next item of a line and accepts it if it is the item they meant. The evaluation suite has held-out lines of
the same families. In a family with random items (a coin, a die) the user means another one each time, so no policy can suggest better than
chance, and silence pays if chance is below `T`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.demo.tasks import TaskPrompt
from ostinato.demo.users import SimulatedUser, UsersConfig, make_user

T = 0.25
"""The break-even acceptance rate of a suggestion. Rewards: 1 - T if accepted, -T if rejected, 0 for silence."""

NOTHING = "-"
"""The model's answer for no suggestion. An empty answer counts as no suggestion, too."""

LINES = 36
HELD_OUT = 12  # of these, lines in the evaluation suite
MAX_TOKENS = 6
STOP = (",", "\n")
ASK = f"Continue each list with one item, or with {NOTHING} where the next item cannot be known."
SHOWN = f"""\
pets: dog, cat, dog, cat, dog
tickets: 83, 12, {NOTHING}
order: first, second, third, fourth
guests: Eve, Kai, Tom, {NOTHING}
evens: 2, 4, 6, 8
"""
"""Few-shot example lines before the user's line: how a list continues, and how an answer without a suggestion looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A list up to the comma before the cursor (`start`), and the items that the user may mean next, all equally likely.

    Example: ``Line(id="coin/3", family="coin", start="coin: tails, heads,", meant=("heads", "tails"))``
    """

    id: str
    family: str
    start: str
    meant: tuple[str, ...]

    @property
    def prompt(self) -> TaskPrompt:
        """The prompt for the next item."""
        return TaskPrompt(
            messages=({"role": "user", "content": ASK}, {"role": "assistant", "content": SHOWN + self.start}),
            max_tokens=MAX_TOKENS,
            stop=STOP,
        )

    def shows(self, text: str) -> bool:
        """Return True if this answer is a suggestion."""
        return text.strip() not in ("", NOTHING)


Family = Callable[[random.Random], tuple[list[str], Sequence[str]]]
"""Random generator -> (the items so far, the possible next items)."""


def _sequence(items: Sequence[str], *, lengths: tuple[int, int]) -> Family:
    """Return a family of consecutive items of a cycle; the next item is certain."""

    def draw(dice: random.Random) -> tuple[list[str], Sequence[str]]:
        first, length = dice.randrange(len(items)), dice.randint(*lengths)
        return [items[(first + k) % len(items)] for k in range(length)], [items[(first + length) % len(items)]]

    return draw


def _count(step: int, first: tuple[int, int], length: int = 3) -> Family:
    """Return a family of arithmetic sequences; the next item is certain."""

    def draw(dice: random.Random) -> tuple[list[str], Sequence[str]]:
        start = dice.randrange(*first)
        return [str(start + step * k) for k in range(length)], [str(start + step * length)]

    return draw


def _chance(items: Sequence[str]) -> Family:
    """Return a family of two to five random items; the next item is random, too."""

    def draw(dice: random.Random) -> tuple[list[str], Sequence[str]]:
        return [dice.choice(items) for _ in range(dice.randint(2, 5))], items

    return draw


def _repeated(items: Sequence[str]) -> Family:
    """Return a family of one item repeated six to nine times; the next item is certain."""

    def draw(dice: random.Random) -> tuple[list[str], Sequence[str]]:
        one = dice.choice(items)
        return [one] * dice.randint(6, 9), [one]

    return draw


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
COLOURS = ("red", "blue", "green", "black", "white", "pink", "brown", "gold", "grey", "orange", "yellow", "purple")
NAMES = (
    *("Ann", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana"),
    *("Ivo", "Jane", "Kurt", "Lena", "Max", "Nora", "Otto", "Pia"),
)

WORDS = (
    "chair",
    "river",
    "bread",
    "cloud",
    "stone",
    "candle",
    "garden",
    "window",
    "bridge",
    "letter",
    "forest",
    "mirror",
)
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi", "Tokyo", "Quito", "Bern", "Kyiv", "Riga", "Baku")

FAMILIES: dict[str, Family] = {
    "same": _repeated(COLOURS),
    "days": _sequence(DAYS, lengths=(2, 7)),
    "months": _sequence(MONTHS, lengths=(1, 4)),
    "letters": _sequence(tuple("abcdefghijklmnopqrstuvwxyz"), lengths=(5, 8)),
    "count": _count(1, (2, 90), length=5),
    "coin": _chance(("heads", "tails")),
    "sevens": _count(7, (2, 70)),
    "dice": _chance(tuple("123456")),
    "cities": _chance(CITIES),
    "names": _chance(NAMES),
    "prices": _chance(tuple(str(price) for price in range(10, 100))),
    "codes": _chance(tuple(str(code) for code in range(100, 1000))),
    "lottery": _chance(tuple(str(ball) for ball in range(1, 50))),
    "seats": _chance(tuple(f"{row}{seat}" for row in range(1, 31) for seat in "ABCDEF")),
    "scores": _chance(tuple(f"{home}:{away}" for home in range(5) for away in range(5))),
    "birthdays": _chance(tuple(f"{day} {month[:3]}" for day in range(1, 29) for month in MONTHS)),
    "times": _chance(tuple(f"{hour}:{minute:02}" for hour in range(24) for minute in range(0, 60, 5))),
    "words": _chance(WORDS),
}
"""In seven of the eighteen families a suggestion pays. In a product, too, most moments are not worth one."""


def split_lines() -> tuple[list[Line], list[Line]]:
    """Return (users' lines, held-out lines), the same in every process and with disjoint starts."""
    users: list[Line] = []
    held_out: list[Line] = []
    for family, draw in FAMILIES.items():
        dice = random.Random(f"tab/{family}")
        starts: dict[str, Sequence[str]] = {}
        while len(starts) < LINES:
            items, meant = draw(dice)
            starts.setdefault(f"{family}: {', '.join(items)},", meant)
        all_lines = [
            Line(id=f"{family}/{number}", family=family, start=start, meant=tuple(meant))
            for number, (start, meant) in enumerate(starts.items())
        ]
        held_out += all_lines[:HELD_OUT]
        users += all_lines[HELD_OUT:]
    return users, held_out


def is_meant(line: Line, text: str, dice: random.Random) -> float:
    """Return 1.0 if the suggestion is the item that the user means this time, else 0.0."""
    return float(text.strip() == dice.choice(line.meant))


def make_typists(lines: Sequence[Line], config: UsersConfig, seed: int) -> list[SimulatedUser]:
    """Return users who type lines of all families, each with a random order of preference."""
    dice = random.Random(f"{seed}/typists")
    families = list(dict.fromkeys(line.family for line in lines))
    return [
        make_user(number, tuple(dice.sample(families, len(families))), config, dice) for number in range(config.count)
    ]


def suite_items(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return lines as items of an evaluation suite. In a family with random items, the suite cycles through the possible next items."""
    turn: dict[str, int] = {}
    items: list[dict[str, Any]] = []
    for line in lines:
        place = turn.setdefault(line.family, random.Random(f"tab/meant/{line.family}").randrange(len(line.meant)))
        turn[line.family] += 1
        items.append(
            {
                "id": line.id,
                "family": line.family,
                "messages": list(line.prompt.messages),
                "continue_final_message": True,
                "sampling": {"max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0, "stop": list(STOP)},
                "grader": "suggestion",
                "meant": line.meant[place % len(line.meant)],
                "nothing": NOTHING,
                "t": T,
            }
        )
    return items
