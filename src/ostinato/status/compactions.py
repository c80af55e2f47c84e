"""Quality of context compaction in people's sessions: how long summaries are, how much they compress, which facts they keep, what followed.

Facts are names, numbers and paths that the model wrote in the answers of a window, tool calls included: what only a user's message or a
tool's result names is not counted, since a turn's prompt is kept as tokens. A fact counts as needed if an answer of the next window names
it again. They are kept as 16-bit hashes, salted with the session: enough to compare sets, too few to tell which words they were. Pure.
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
"""Tokens of a prompt from which on a session may have to be summarised; shorter ones are not followed."""
SESSIONS, WINDOWS, SUMMARIES = 2_000, 500, 500
"""How many of the newest are kept: sessions with their rewards, sessions with the facts of their windows, summaries."""
LEAST_PEOPLE = 10
"""People on each side of a comparison from which on it has an interval."""
_FACTS = 256  # of a window
_PENDING = 4  # summaries of a session that no window began with yet
_CHARS = 8_000  # of an answer that are read
_WORD = re.compile(r"[\w./-]{2,100}")

Session = tuple[str, str]
"""Tenant and episode."""


def facts_of(text: str, salt: str) -> set[int]:
    """Hashes of the names, numbers and paths in a text: words with a digit, an inner dot, slash or underscore, or capitals inside.

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
    """A summary: tokens of the prompt that asked for it and of its text, tokens of the first prompt after it (0: none yet), and the facts
    of the window, those that it keeps, and those that the next window's answers name.
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
    """A summary that a window began with: `prompt` tokens became `tokens`, and the next window began at `after`. Of the window's `facts` it
    keeps `kept`; of the `needed` ones, which answers after it name again, `found` stand in it.
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
    """A session's current window: its facts, summaries that no window began with yet, by turn, and the one that it began with."""

    facts: set[int] = field(default_factory=set[int])
    pending: OrderedDict[str, _Summary] = field(default_factory=OrderedDict[str, _Summary])
    began: _Summary | None = None

    def state(self) -> list[Any]:
        pending = [[turn, summary.state()] for turn, summary in self.pending.items()]
        return [sorted(self.facts), pending, self.began and self.began.state()]


@dataclass(slots=True)
class _Rated:
    """A session's rewards, clipped to [-1, 1], how many windows began with a summary, and the tokens of its longest prompt and of the
    longest with which one of its windows began: instructions and tools, with the summary or the first question.
    """

    user: str
    total: float = 0.0
    count: int = 0
    windows: int = 0
    longest: int = 0
    opening: int = 0


class CompactionTally:
    """Turns and rewards in, the newest summaries and long sessions out; bounded, and free of words.

    `asked`: summaries that were sampled for people, `begun`: windows that began with one of them.

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
        """Take in a person's turn; True if its session is followed, so that its reward counts."""
        session = (turn.tenant, turn.episode)
        if turn.redacted or (len(turn.prompt_ids) < LONG_PROMPT and session not in self.sessions):
            return False
        new, length = session not in self.sessions, len(turn.prompt_ids)
        rated, window = self._held(session, turn.user)
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
            said = facts_of(turn.text, turn.episode)
            window.facts.update(sorted(said)[: _FACTS - len(window.facts)])
            if window.began is not None:
                window.began.used |= said & window.began.window
        return turn.purpose is Purpose.TASK

    def reward(self, session: Session, value: float) -> None:
        """Take in the reward of a turn of a session that is followed."""
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
        """The newest summaries that a window began with."""
        opened = [window.began.counts(tenant) for (tenant, _), window in self._windows.items() if window.began]
        return [*self._closed, *opened][-SUMMARIES:]

    def _held(self, session: Session, user: str) -> tuple[_Rated, _Window]:
        """A session's rewards and window, which are now the newest; the oldest go."""
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


# ---------------------------------------------------------------- as an operator sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRewards:
    """Mean rewards of people's long sessions, in [-1, 1]: `with_summary` of those that were summarised, `without` of the others, each over
    so many `people`. `between`: bounds of their difference (95%, people as clusters); None with fewer than `LEAST_PEOPLE` on a side.
    """

    with_summary: float
    without: float
    people: tuple[int, int]
    between: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionsNow:
    """Summaries of people's sessions. `asked`: those sampled, `begun`: windows that began with one; the figures are over the newest `seen`
    of these: medians of a summary's `tokens`, of how many times longer the prompt was (`ratio`), and of the next window's first prompt as a
    share of it (`left`). `kept`: the share of a window's `facts` that its summary keeps, `found`: that of the `needed` facts, which the
    next window's answers name again, with bounds (95%, people as clusters). `rewards`: None before there are sessions of both kinds.

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
    """The figures; None before the first summary."""
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
    """The longest prompt of the newest long sessions, and for each the longest with which a window began, in tokens."""
    rated = tally.sessions.values()
    return max((each.longest for each in rated), default=0), [each.opening for each in rated]


def _rewards(tally: CompactionTally) -> SessionRewards | None:
    """Sessions that were summarised beside the others. Both lie in [-1, 1]; the interval's formula takes shares."""
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
    """Which facts summaries keep, in one sentence.

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
    """What followed summaries, in one sentence with its interval or what it still lacks.

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
    """Summaries in one line, for a terminal."""
    words = f"summaries: {found.asked} sampled, {found.begun} windows began with one"
    if found.seen:
        words += f"; median {found.tokens:.0f} tokens, 1/{found.ratio:.0f} of the prompt, of which {100 * found.left:.0f}% are left"
    return f"{words}; {facts_sentence(found)}; {rewards_sentence(found)}"
