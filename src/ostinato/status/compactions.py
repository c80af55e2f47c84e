"""Quality of context compaction in people's sessions: length and compression of summaries, facts that they keep, and later rewards.

Facts are names, numbers and paths in the model's answers of a window, tool calls included. Facts that only a user's message or a tool's
result names are not counted, because a turn's prompt is stored as tokens. A fact counts as needed if an answer of the next window names it
again. Facts are kept as 16-bit hashes, salted with the session: enough to compare sets, too few to tell the words. Pure.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Any
from zlib import crc32

from ostinato.core.notices import Forgotten
from ostinato.core.records import Person, Purpose, Turn
from ostinato.evaluate.statistics import clustered_difference, clustered_share

LONG_PROMPT = 1_000
"""A session is followed from its first prompt with this many tokens on, because it may have to be summarised."""
SESSIONS, WINDOWS, SUMMARIES = 2_000, 500, 500
"""How many of the newest sessions with their rewards, sessions with the facts of their windows, and summaries are kept."""
LEAST_PEOPLE = 10
"""People needed on each side of a comparison for an interval."""
_FACTS = 256  # most facts of a window
_PENDING = 4  # most summaries of a session with which no window has begun yet
_CHARS = 8_000  # most characters of an answer that are read
_WORD = re.compile(r"[\w./-]{2,100}")

Session = tuple[str, str]
"""Tenant and episode."""


def facts_of(text: str, salt: str) -> set[int]:
    """Return hashes of the names, numbers and paths in a text: words with a digit, an inner dot, slash or underscore, or inner capitals.

    Example: ``len(facts_of("Mend read_1 in src/parser.py, line 42.", "e1")) == 3``
    """
    words = {word.strip("./-") for word in _WORD.findall(text[:_CHARS])}
    seed = crc32(salt.encode())
    return {crc32(word.encode(), seed) & 0xFFFF for word in words if _is_fact(word)}


def _is_fact(word: str) -> bool:
    if word.isdecimal():
        return len(word) > 1
    telling = any(each in "./_" or each.isdigit() for each in word) or any(each.isupper() for each in word[1:])
    return len(word) > 2 and telling and not word.isupper()


@dataclass(slots=True)
class _Summary:
    """A summary: the tokens of the prompt that asked for it, of its text, and of the first prompt after it (0: none yet); the facts of the
    window, those that the summary keeps, and those that the next window's answers name.
    """

    user: str
    prompt: int
    tokens: int
    after: int = 0
    window: set[int] = field(default_factory=set[int])
    kept: set[int] = field(default_factory=set[int])
    used: set[int] = field(default_factory=set[int])

    def counts(self, tenant: str) -> SummaryCounts:
        return SummaryCounts(
            person=(tenant, self.user),
            prompt=self.prompt,
            tokens=self.tokens,
            after=self.after,
            facts=len(self.window),
            kept=len(self.window & self.kept),
            needed=len(self.used),
            found=len(self.used & self.kept),
        )

    def state(self) -> list[Any]:
        return [self.user, self.prompt, self.tokens, self.after, *map(sorted, (self.window, self.kept, self.used))]

    @classmethod
    def of(cls, state: Sequence[Any]) -> _Summary:
        user, prompt, tokens, after, window, kept, used = state
        return cls(str(user), int(prompt), int(tokens), int(after), set(window), set(kept), set(used))


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryCounts:
    """A summary with which a window began: `prompt` tokens became `tokens`, and the next window began with a prompt of `after` tokens.

    It keeps `kept` of the window's `facts`, and `found` of the `needed` ones, which later answers name again.
    """

    person: Person
    prompt: int
    tokens: int
    after: int
    facts: int
    kept: int
    needed: int
    found: int


@dataclass(slots=True)
class _Window:
    """A session's current window: its facts, {turn: summary with which no window has begun yet}, and the summary with which it began."""

    facts: set[int] = field(default_factory=set[int])
    pending: OrderedDict[str, _Summary] = field(default_factory=OrderedDict[str, _Summary])
    began: _Summary | None = None

    def state(self) -> list[Any]:
        pending = [[turn, summary.state()] for turn, summary in self.pending.items()]
        return [sorted(self.facts), pending, self.began and self.began.state()]


@dataclass(slots=True)
class _Rated:
    """A session's rewards, clipped to [-1, 1], and how many windows began with a summary.

    `longest`: tokens of its longest prompt. `opening`: tokens of the longest prompt with which a window began (instructions and tools, with
    the summary or the first question).
    """

    user: str
    total: float = 0.0
    count: int = 0
    windows: int = 0
    longest: int = 0
    opening: int = 0


class CompactionTally:
    """A tally of people's turns and rewards: the newest summaries and long sessions. Its size is bounded, and it stores no text.

    `asked`: summaries sampled for people. `begun`: windows that began with one.

    Example: ``tally.turn(turn)``, later ``tally.reward(("acme", "e1"), 1.0)``, then ``compactions_now(tally)``
    """

    def __init__(self) -> None:
        self.asked = self.begun = 0
        self.sessions: OrderedDict[Session, _Rated] = OrderedDict()
        self._windows: OrderedDict[Session, _Window] = OrderedDict()
        self._closed: deque[SummaryCounts] = deque(maxlen=SUMMARIES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompactionTally) and self.state() == other.state()

    def turn(self, turn: Turn) -> bool:
        """Add a person's turn. Return True if its session is followed, so that its reward counts."""
        session = (turn.tenant, turn.episode)
        if turn.redacted or (len(turn.prompt_ids) < LONG_PROMPT and session not in self.sessions):
            return False
        new, length = session not in self.sessions, len(turn.prompt_ids)
        rated, window = self._touch(session, turn.user)
        rated.longest = max(rated.longest, length)
        if turn.purpose is Purpose.COMPACTION:
            self.asked += 1
            kept = facts_of(turn.text, turn.episode)
            summary = _Summary(
                turn.user, len(turn.prompt_ids), len(turn.sampled_ids), window=set(window.facts), kept=kept
            )
            window.pending[turn.id] = summary
            if len(window.pending) > _PENDING:
                window.pending.popitem(last=False)
            return True
        begins = None if turn.window is None else turn.window.begins_with
        if new or begins in window.pending:
            rated.opening = max(rated.opening, length)
        if begins in window.pending:
            self.begun += 1
            rated.windows += 1
            self._close(session[0], window)
            window.began = window.pending.pop(begins)
            window.began.after = len(turn.prompt_ids)
            window.facts = set(window.began.kept)
            window.pending.clear()
        if turn.purpose is Purpose.TASK and len(window.facts) < _FACTS:
            facts = facts_of(turn.text, turn.episode)
            window.facts.update(sorted(facts)[: _FACTS - len(window.facts)])
            if window.began is not None:
                window.began.used |= facts & window.began.window
        return turn.purpose is Purpose.TASK

    def reward(self, session: Session, value: float) -> None:
        """Add the reward of a turn whose session is followed."""
        rated = self.sessions.get(session)
        if rated is not None:
            rated.total += min(1.0, max(-1.0, value))
            rated.count += 1

    def forget(self, gone: Forgotten) -> None:
        """Drop somebody's sessions and summaries."""
        for session in [each for each, rated in self.sessions.items() if gone.covers((each[0], rated.user))]:
            del self.sessions[session]
            self._windows.pop(session, None)
        kept = [each for each in self._closed if not gone.covers(each.person)]
        self._closed = deque(kept, maxlen=SUMMARIES)

    def summaries(self) -> list[SummaryCounts]:
        """Return the newest summaries with which a window began."""
        opened = [window.began.counts(tenant) for (tenant, _), window in self._windows.items() if window.began]
        return [*self._closed, *opened][-SUMMARIES:]

    def _touch(self, session: Session, user: str) -> tuple[_Rated, _Window]:
        """Return a session's rewards and window, and make it the newest; evict the oldest."""
        rated, window = self.sessions.setdefault(session, _Rated(user)), self._windows.setdefault(session, _Window())
        self.sessions.move_to_end(session)
        self._windows.move_to_end(session)
        if len(self.sessions) > SESSIONS:
            self.sessions.popitem(last=False)
        if len(self._windows) > WINDOWS:
            (tenant, _), oldest = self._windows.popitem(last=False)
            self._close(tenant, oldest)
        return rated, window

    def _close(self, tenant: str, window: _Window) -> None:
        if window.began is not None:
            self._closed.append(window.began.counts(tenant))

    def state(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "begun": self.begun,
            "sessions": [[*key, *astuple(rated)] for key, rated in self.sessions.items()],
            "windows": [[*key, *window.state()] for key, window in self._windows.items()],
            "closed": [[*counts.person, *astuple(counts)[1:]] for counts in self._closed],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> CompactionTally:
        """Restore a tally from `state`. Raises KeyError, TypeError or ValueError for another version's."""
        made = cls()
        made.asked, made.begun = int(state["asked"]), int(state["begun"])
        for tenant, episode, *rated in state["sessions"]:
            made.sessions[tenant, episode] = _Rated(*rated)
        for tenant, episode, facts, pending, began in state["windows"]:
            waiting = OrderedDict((str(turn), _Summary.of(each)) for turn, each in pending)
            made._windows[tenant, episode] = _Window(set(facts), waiting, began and _Summary.of(began))
        for tenant, user, *counts in state["closed"]:
            numbers = dict(zip(("prompt", "tokens", "after", "facts", "kept", "needed", "found"), counts, strict=True))
            made._closed.append(SummaryCounts(person=(str(tenant), str(user)), **numbers))
        return made


# ---------------------------------------------------------------- figures for an operator


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRewards:
    """Mean rewards of people's long sessions, in [-1, 1]: `with_summary` and `without`, with the number of `people` on each side.

    `between`: the 95% interval of their difference, clustered by person; None with fewer than `LEAST_PEOPLE` on a side.
    """

    with_summary: float
    without: float
    people: tuple[int, int]
    between: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionsNow:
    """Summaries of people's sessions. `asked`: summaries sampled; `begun`: windows that began with one.

    The other figures are over the newest `seen` of these. Medians: a summary's `tokens`; `ratio`: the prompt's length relative to it;
    `left`: the length of the next window's first prompt relative to that prompt. `kept`: the share of a window's `facts` that its summary
    keeps. `found`: the share kept of the `needed` facts, which the next window's answers name again, with its 95% interval, clustered by
    person. `rewards`: None until there are sessions with and without summaries.

    Example: ``compactions_now(summary.compactions)``
    """

    asked: int
    begun: int
    seen: int = 0
    tokens: float = 0.0
    ratio: float = 0.0
    left: float = 0.0
    facts: int = 0
    kept: float | None = None
    needed: int = 0
    found: float | None = None
    found_between: tuple[float, float] | None = None
    rewards: SessionRewards | None = None


def compactions_now(tally: CompactionTally) -> CompactionsNow | None:
    """Return the figures; None before the first summary."""
    if not tally.asked:
        return None
    summaries = tally.summaries()
    if not summaries:
        return CompactionsNow(asked=tally.asked, begun=tally.begun, rewards=_rewards(tally))
    facts, needed = sum(each.facts for each in summaries), sum(each.needed for each in summaries)
    by_person: defaultdict[Person, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for each in summaries:
        found, of = by_person[each.person]
        by_person[each.person] = (found + each.found, of + each.needed)
    enough = sum(of > 0 for _, of in by_person.values()) >= LEAST_PEOPLE
    return CompactionsNow(
        asked=tally.asked,
        begun=tally.begun,
        seen=len(summaries),
        tokens=median(each.tokens for each in summaries),
        ratio=median(each.prompt / max(1, each.tokens) for each in summaries),
        left=median(each.after / max(1, each.prompt) for each in summaries),
        facts=facts,
        kept=sum(each.kept for each in summaries) / facts if facts else None,
        needed=needed,
        found=sum(each.found for each in summaries) / needed if needed else None,
        found_between=clustered_share(by_person) if enough else None,
        rewards=_rewards(tally),
    )


def prompt_lengths(tally: CompactionTally) -> tuple[int, Sequence[int]]:
    """Return the longest prompt of the newest long sessions and, for each session, the longest with which a window began, in tokens."""
    rated = tally.sessions.values()
    return max((each.longest for each in rated), default=0), [each.opening for each in rated]


def _rewards(tally: CompactionTally) -> SessionRewards | None:
    """Compare sessions with and without summaries. Rewards are in [-1, 1]; the interval is computed on shares in [0, 1]."""
    sides: tuple[dict[Person, tuple[float, float]], ...] = ({}, {})
    for (tenant, _), rated in tally.sessions.items():
        if rated.count:
            side, person = sides[0 if rated.windows else 1], (tenant, rated.user)
            total, count = side.get(person, (0.0, 0.0))
            side[person] = (total + (1.0 + rated.total / rated.count) / 2.0, count + 1.0)
    if not all(sides):
        return None
    people = (len(sides[0]), len(sides[1]))
    means = [2.0 * sum(total for total, _ in side.values()) / sum(n for _, n in side.values()) - 1.0 for side in sides]
    between = None
    if min(people) >= LEAST_PEOPLE:
        found = clustered_difference(*sides)
        between = (2.0 * found.lower, 2.0 * found.upper)
    return SessionRewards(with_summary=means[0], without=means[1], people=people, between=between)


def facts_sentence(found: CompactionsNow) -> str:
    """Describe in one sentence which facts summaries keep.

    Example: "summaries keep 61% of the facts that answers named before them, and 84% [71%, 92%] of the 312 that answers name again"
    """
    if found.kept is None:
        return "no answer before a summary named a fact" if found.seen else "no window began with one of them yet"
    words = f"summaries keep {100 * found.kept:.0f}% of the facts that answers named before them"
    if found.found is None:
        return f"{words}; no answer after one named any again"
    between = (
        "" if found.found_between is None else " [{:.0f}%, {:.0f}%]".format(*(100 * b for b in found.found_between))
    )
    return f"{words}, and {100 * found.found:.0f}%{between} of the {found.needed:,} that answers name again"


def rewards_sentence(found: CompactionsNow) -> str:
    """Describe in one sentence the rewards after summaries, with the interval or what is missing for it.

    Example: "sessions that were summarised earn +0.31, other long ones +0.40: -0.09, 95% [-0.20, +0.02]"
    """
    rewards = found.rewards
    if rewards is None:
        return "no rewards yet of long sessions both with a summary and without"
    words = f"sessions that were summarised earn {rewards.with_summary:+.2f}, other long ones {rewards.without:+.2f}"
    if rewards.between is None:
        sides = "{} and {}".format(*rewards.people)
        return f"{words}; too few people for an interval ({sides}; {LEAST_PEOPLE} on each side are needed)"
    lower, upper = rewards.between
    return f"{words}: {rewards.with_summary - rewards.without:+.2f}, 95% [{lower:+.2f}, {upper:+.2f}]"


def compactions_line(found: CompactionsNow) -> str:
    """Describe summaries in one line, for a terminal."""
    words = f"summaries: {found.asked} sampled, {found.begun} windows began with one"
    if found.seen:
        words += f"; median {found.tokens:.0f} tokens, 1/{found.ratio:.0f} of the prompt, of which {100 * found.left:.0f}% are left"
    return f"{words}; {facts_sentence(found)}; {rewards_sentence(found)}"
