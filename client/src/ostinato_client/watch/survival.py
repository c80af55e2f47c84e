"""Follows the lines that tool calls wrote through the versions of one file, in the order in which they were seen. Pure.

Each line that a call writes gets a number. A version of the file lists for each of its lines the numbers that continue in it. A number is
kept as long as its whole line stands. When a line is changed or gone, its number is lost, and comes back only if the line does (an undo
undone, a branch left and entered again): then it is found in an earlier version, by text and place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato_client.watch.aligning import carry, counts, key, telling

_MOST_PAST = 16
_MOST_ALIGNED = 5  # candidates for a renamed file that are compared, those that share the most lines with it


@dataclass(frozen=True)
class Version:
    """A file's lines, and for each the numbers of written lines that continue in it.

    Example: ``Version(("import os", "x = 1"), ((), (7,)))``
    """

    lines: tuple[str, ...] = ()
    numbers: tuple[tuple[int, ...], ...] = ()

    @property
    def kept(self) -> frozenset[int]:
        """The numbers that stand."""
        return frozenset(number for numbers in self.numbers for number in numbers)

    @staticmethod
    def of(lines: Sequence[str]) -> Version:
        """A version that no call has written in."""
        return Version(tuple(lines), ((),) * len(lines))


@dataclass(frozen=True)
class Followed:
    """A file as it was seen last, and earlier versions with numbers that are now lost.

    Example: ``Followed(Version.of(["a"])).written(["a", "b"], first=0)[0].kept == {0}``
    """

    now: Version = field(default_factory=Version)
    past: tuple[Version, ...] = ()

    @property
    def kept(self) -> frozenset[int]:
        """The numbers that stand."""
        return self.now.kept

    def written(self, lines: Sequence[str], *, first: int) -> tuple[Followed, int]:
        """A call makes these the file's lines: new lines are the call's, lines that it only moved or reformatted are not.

        Args:
            lines: the file as the call left it.
            first: the number of the first line that it writes; the following ones count up.

        Returns:
            The file, and how many lines the call wrote.
        """
        carried = carry(self.now.lines, lines)
        numbers = _carried_numbers(self.now, carried)
        next_number = first
        for j, line in enumerate(lines):
            if not carried[j] and counts(line):
                numbers[j] = (next_number,)
                next_number += 1
        return self._then(Version(tuple(lines), tuple(numbers))), next_number - first

    def changed(self, lines: Sequence[str]) -> Followed:
        """Somebody else, or something unknown, makes these the file's lines."""
        new = tuple(lines)
        if new == self.now.lines:
            return self
        again = next((version for version in reversed(self.past) if version.lines == new), None)
        return self._then(again or self._restored(new))

    def standing(self, lines: Sequence[str]) -> frozenset[int]:
        """The numbers that stand in another version of the file, a commit's for instance."""
        return self.changed(lines).kept

    def _restored(self, lines: tuple[str, ...]) -> Version:
        """The next version, with the numbers that came back from earlier ones."""
        carried = carry(self.now.lines, lines)
        numbers = _carried_numbers(self.now, carried)
        for version in reversed(self.past):
            kept = frozenset(number for each in numbers for number in each)
            if version.kept <= kept:
                continue
            # only a new line can have come back; a line that was there all the time keeps its numbers
            back = [
                olds if not carried[j] and not numbers[j] else () for j, olds in enumerate(carry(version.lines, lines))
            ]
            whole = _returned(version, {i for olds in back for i in olds}, kept)
            for j, olds in enumerate(back):
                numbers[j] += tuple(number for i in olds for number in version.numbers[i] if number in whole)
        return Version(lines, tuple(numbers))

    def _then(self, version: Version) -> Followed:
        if self.now.kept <= version.kept:
            return Followed(version, self.past)
        past = tuple(each for each in self.past if each.lines != self.now.lines)
        return Followed(version, (*past, self.now)[-_MOST_PAST:])


def _carried_numbers(version: Version, carried: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each new line, the numbers that continue in it: only those of which every piece continues."""
    going = {i for olds in carried for i in olds}
    lost = {number for i, numbers in enumerate(version.numbers) if i not in going for number in numbers}
    return [
        tuple(dict.fromkeys(number for i in olds for number in version.numbers[i] if number not in lost))
        for olds in carried
    ]


def _returned(version: Version, back: set[int], kept: frozenset[int]) -> frozenset[int]:
    """The lost numbers whose whole lines came back.

    Of consecutive lines that were lost together, all have to be back, or some consecutive ones that their text identifies: new code in
    their place may well repeat a short line of them.
    """
    back = set(back)
    run: list[int] = []
    for i in [i for i, line in enumerate(version.lines) if counts(line)] + [-1]:
        if i >= 0 and version.numbers[i] and kept.isdisjoint(version.numbers[i]):
            run.append(i)
            continue
        if not back.issuperset(run):
            back -= _untold(version, run, back)
        run = []
    missing = {number for i, each in enumerate(version.numbers) if i not in back for number in each}
    return version.kept - missing - kept


def _untold(version: Version, run: list[int], back: set[int]) -> set[int]:
    found: set[int] = set()
    part: list[int] = []
    for i in [*run, -1]:
        if i in back:
            part.append(i)
            continue
        if not telling(version.lines[each] for each in part):
            found.update(part)
        part = []
    return found


def likest(lines: Sequence[str], others: Sequence[Sequence[str]], former: Sequence[bool]) -> int | None:
    """The index of the file that continues these lines, as after a rename: at least half of both continues, and in no other as much.

    Args:
        lines: the lines of the file that is gone.
        others: the lines of each new file.
        former: True for each new file with a name that the lost file had before; for it, a part that is no coincidence is enough.

    Example: ``likest(["a1", "b2"], [["x"], ["a1", "b2", "c3"]], [False, False]) == 1``
    """
    total = sum(1 for line in lines if counts(line))
    own = frozenset(map(key, filter(counts, lines)))
    alike = [len(own & frozenset(map(key, filter(counts, other)))) for other in others]
    nearest = sorted(range(len(others)), key=lambda n: (not former[n], -alike[n]))[:_MOST_ALIGNED]
    shares: dict[int, float] = {}
    for n in nearest:
        same = {i for olds in carry(lines, others[n]) for i in olds}
        share = len(same) / max(total, sum(1 for line in others[n] if counts(line)), 1)
        if share >= 0.5 or (former[n] and telling(lines[i] for i in same)):
            shares[n] = share + former[n]
    best = [n for n, share in shares.items() if share == max(shares.values())]
    return best[0] if len(best) == 1 else None
