"""Tab's tasks: short lists that a simulated user is typing, of families whose next item is certain, hard, or impossible to know.

In the data flow: a simulated user asks for the next item of one of the users' lines and accepts it if it is the item they meant; the
evaluation suite is made of held-out lines of the same families. In a family whose next item is random (a coin, a die), the user means
another one each time, so no policy's suggestion is right more often than chance: there silence pays if chance is below t.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.demo.tasks import TaskPrompt
from ostinato.demo.users import SimulatedUser, UsersConfig, make_user

T = 0.25
"""A suggestion pays if it is accepted more often than this: 1 - T for an accepted one, -T for a rejected one, 0 for silence."""

NOTHING = "-"
"""The model's answer to suggest nothing. An empty answer suggests nothing either."""

LINES = 36
HELD_OUT = 12  # of these, for the suite
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
"""The example lines before the user's: they show how a list continues, and how an answer without a suggestion looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A list up to the comma before the cursor, and the next items that the user may mean, all equally likely.

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
        """Whether this answer is a suggestion."""
        return text.strip() not in ("", NOTHING)


Family = Callable[[random.Random], tuple[list[str], Sequence[str]]]
"""dice -> the items so far, and the possible next items."""


def _sequence(items: Sequence[str], *, lengths: tuple[int, int]) -> Family:
    """Consecutive items of a cycle; the next one is certain."""

    def draw(dice: random.Random) -> tuple[list[str], Sequence[str]]:
        first, length = dice.randrange(len(items)), dice.randint(*lengths)
        return [items[(first + k) % len(items)] for k in range(length)], [items[(first + length) % len(items)]]

    return draw


def _count(step: int, first: tuple[int, int], length: int = 3) -> Family:
    """Numbers at equal steps; the next one is certain."""

    def draw(dice: random.Random) -> tuple[list[str], Sequence[str]]:
        start = dice.randrange(*first)
        return [str(start + step * k) for k in range(length)], [str(start + step * length)]

    return draw


def _chance(items: Sequence[str]) -> Family:
    """Two to five items drawn at random; so is the next one."""

    def draw(dice: random.Random) -> tuple[list[str], Sequence[str]]:
        return [dice.choice(items) for _ in range(dice.randint(2, 5))], items

    return draw


def _repeated(items: Sequence[str]) -> Family:
    """Six to nine times the same; the next one is certain."""

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
"""Seven of the eighteen are worth a suggestion. In a product, too, most moments are worth none."""


def split_lines() -> tuple[list[Line], list[Line]]:
    """(users' lines, held-out lines), the same in every process. No line's start is on both sides."""
    users: list[Line] = []
    held_out: list[Line] = []
    for family, draw in FAMILIES.items():
        dice = random.Random(f"tab/{family}")
        found: dict[str, Sequence[str]] = {}
        while len(found) < LINES:
            items, meant = draw(dice)
            found.setdefault(f"{family}: {', '.join(items)},", meant)
        made = [
            Line(id=f"{family}/{number}", family=family, start=start, meant=tuple(meant))
            for number, (start, meant) in enumerate(found.items())
        ]
        held_out += made[:HELD_OUT]
        users += made[HELD_OUT:]
    return users, held_out


def is_meant(line: Line, text: str, dice: random.Random) -> float:
    """1.0 if the suggestion is what the user means this time, else 0.0."""
    return float(text.strip() == dice.choice(line.meant))


def make_typists(lines: Sequence[Line], config: UsersConfig, seed: int) -> list[SimulatedUser]:
    """The crowd: each user types lines of every family, their own favourites more often."""
    dice = random.Random(f"{seed}/typists")
    families = list(dict.fromkeys(line.family for line in lines))
    return [
        make_user(number, tuple(dice.sample(families, len(families))), config, dice) for number in range(config.count)
    ]


def suite_items(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Lines as items of an evaluation suite. If a family's next item is random, its suite items mean each possible one in turn."""
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
