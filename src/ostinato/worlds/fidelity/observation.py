"""Observations of machines and conversations as flat feature mappings, and their encoding as a matrix.

A conversation's features describe the messages that a model sees, and their timing. Words of the system prompt are features themselves; of
other messages only lengths and character statistics are. A hash of the opening messages identifies the question; it leaves out the system
prompt, which belongs to the environment and not to the task. In the matrix each feature has columns for its presence, its most frequent
text values, its rank, and its distance from the median.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ostinato.core.conversation import Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import Turn

Feature = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation.

    `group`: the cluster of dependent observations, such as a machine or a task. `asked`: a hash of the question that opened an episode, the
    same for the same question; "" if there was none or it is unknown.

    Example: ``Observation(group="web-1", features={"cpu.count": 8.0, "kernel.system": "Linux", "tool:git": 1.0})``
    """

    group: str
    features: Mapping[str, Feature]
    asked: str = ""

    def line(self) -> str:
        """Return the observation as a line of JSON."""
        asked = {"asked": self.asked} if self.asked else {}
        return json.dumps({"group": self.group, **asked, "features": dict(self.features)})


def parse_observation(line: str) -> Observation:
    """Parse a line of `Observation.line`. Raises BadRequest."""
    try:
        row = json.loads(line)
        group, features, asked = row["group"], row["features"], row.get("asked", "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRequest(f'not an observation: {error}; a line is {{"group": "...", "features": {{...}}}}') from error
    if not isinstance(group, str) or not isinstance(features, dict) or not isinstance(asked, str):
        raise BadRequest("not an observation: `group` and `asked` must be strings and `features` an object")
    kept: dict[str, Feature] = {}
    for name, value in cast("dict[str, Any]", features).items():
        if not isinstance(value, str | int | float):
            raise BadRequest(f"feature {name!r} is neither a number nor a string", field=name)
        kept[name] = value if isinstance(value, str) else float(value)
    return Observation(group=group, features=kept, asked=asked)


# ---------------------------------------------------------------- columns


Floats = NDArray[np.float64]

MAX_VALUES = 40
"""Number of a text feature's most frequent values that get an indicator column."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """N observations as C standardised columns (mean 0, variance 1).

    `values_NC`: the columns, of which those equal up to sign are merged under a joint name. `raw_NC`: the values to show to people, NaN if
    missing. `label_N`: 1 for production, 0 for simulation. `groups_N`: group numbers.
    """

    names: tuple[str, ...]
    values_NC: Floats
    raw_NC: Floats
    label_N: NDArray[np.int64]
    groups_N: NDArray[np.int64]

    def examples(self, place: int) -> tuple[str, str]:
        """Summarise a column on each side: how many observations have it, or the median and range of its numbers."""
        first, second = (_summary(self.raw_NC[self.label_N == side, place]) for side in (1, 0))
        return first, second


def columns_of(production: Sequence[Observation], simulation: Sequence[Observation]) -> Columns:
    """Encode the observations of both sides. The encoding does not depend on which side an observation is from."""
    both = [*production, *simulation]
    label_N = np.array([1] * len(production) + [0] * len(simulation), dtype=np.int64)
    numbers = {group: number for number, group in enumerate(sorted({each.group for each in both}))}
    named: dict[bytes, list[str]] = {}
    kept: list[tuple[str, Floats, Floats]] = []
    for name in sorted({name for each in both for name in each.features}):
        for column, raw_N, value_N in _feature_columns(name, both):
            if np.ptp(value_N) < 1e-12:
                continue
            value_N = (value_N - value_N.mean()) / value_N.std()
            sign = 1.0 if value_N[np.flatnonzero(np.abs(value_N) > 1e-12)[0]] > 0 else -1.0
            key = np.round(sign * value_N, 9).tobytes()
            if key not in named:
                kept.append((column, raw_N, value_N))
            named.setdefault(key, []).append(column)
    joined = {each[0]: each for each in named.values()}
    return Columns(
        names=tuple(_merged_name(joined[name]) for name, _, _ in kept),
        values_NC=np.column_stack([value_N for _, _, value_N in kept]) if kept else np.zeros((len(both), 0)),
        raw_NC=np.column_stack([raw_N for _, raw_N, _ in kept]) if kept else np.zeros((len(both), 0)),
        label_N=label_N,
        groups_N=np.array([numbers[each.group] for each in both], dtype=np.int64),
    )


def deal_folds(
    groups_N: NDArray[np.int64], label_N: NDArray[np.int64], folds: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return a fold for each observation. Groups stay whole, and each side's groups are spread evenly over the folds."""
    groups, first_N = np.unique(groups_N, return_inverse=True)
    share_G = np.bincount(first_N, weights=label_N) / np.bincount(first_N)
    order = np.lexsort((rng.random(len(groups)), share_G))
    place_G = np.empty(len(groups), dtype=np.int64)
    place_G[order] = (np.arange(len(groups)) + rng.integers(folds)) % folds
    return place_G[first_N]


def _feature_columns(name: str, both: Sequence[Observation]) -> list[tuple[str, Floats, Floats]]:
    """Return the columns of one feature as (name, values to show, values to learn from)."""
    values = [each.features.get(name) for each in both]
    there_N = np.array([float(value is not None) for value in values])
    columns = [(f"{name} is there", there_N, there_N)]
    texts = Counter(value for value in values if isinstance(value, str))
    for text, _ in texts.most_common(MAX_VALUES):
        is_N = np.array([float(value == text) for value in values])
        columns.append((f"{name} = {text[:80]}", is_N, is_N))
    raw_N = np.array([value if isinstance(value, float) else np.nan for value in values])
    known_N = np.isfinite(raw_N)
    if known_N.any() and np.ptp(raw_N[known_N]) > 0:
        rank_N = np.full(len(both), 0.5)
        rank_N[known_N] = _ranks(raw_N[known_N])
        columns.append((name, raw_N, rank_N))
        if len(set(raw_N[known_N].tolist())) > 2:
            far_N = np.where(known_N, np.abs(rank_N - 0.5), 0.25)
            away_N = np.abs(raw_N - np.median(raw_N[known_N]))
            columns.append((f"{name}, how far from the middle", away_N, far_N))
    return columns


def _ranks(values_N: Floats) -> Floats:
    """Return mid-ranks, scaled to (0, 1)."""
    _, place_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    upto = np.cumsum(counts)
    return (upto - 0.5 * counts)[place_N] / len(values_N)


def _merged_name(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} alike: {', '.join(names[1:4])})"


def _summary(raw_N: Floats) -> str:
    known_N = raw_N[np.isfinite(raw_N)]
    if set(known_N.tolist()) <= {0.0, 1.0}:
        return f"{int(known_N.sum())} of {len(raw_N)}"
    return f"{np.median(known_N):.4g} [{known_N.min():.4g}, {known_N.max():.4g}]"


# ---------------------------------------------------------------- features of a conversation


MAX_WORDS = 400
_ROLES = frozenset(role.value for role in Role)
_WORD = re.compile(r"[A-Za-z_/.-]{3,40}")


def of_turns(turns: Sequence[Turn], pieces: Callable[[int], bytes], group: str) -> Observation:
    """Observe an episode's captured turns, oldest first: the first prompt (split at control tokens), lengths, and gaps between turns.

    `pieces` maps a token to its bytes, b"" for a control token. Raises BadRequest without turns.
    """
    if not turns:
        raise BadRequest("an episode without turns cannot be observed")
    parts = list(_segments(turns[0].prompt_ids, pieces))
    features: dict[str, Feature] = {
        "turns": float(len(turns)),
        "prompt.tokens": float(len(turns[0].prompt_ids)),
        "answer.tokens": fmean(len(turn.sampled_ids) for turn in turns),
        "seconds": median(turn.ended_at - turn.started_at for turn in turns),
        "limit": float(turns[0].sampling.max_tokens),
        "temperature": turns[0].sampling.temperature,
    }
    gaps = [later.started_at - earlier.ended_at for earlier, later in pairwise(turns)]
    if gaps:
        features |= {"gap_s": median(gaps), "gap_s.least": min(gaps)}
    by_role: dict[str, list[str]] = defaultdict(list)
    messages: list[tuple[str, str]] = []
    for part in parts:
        role, _, text = part.partition("\n")
        messages.append((role, text) if role in _ROLES else ("other", part))
        by_role[messages[-1][0]].append(messages[-1][1])
    features.update(_words("system", " ".join(by_role.get("system", ()))))
    for role, texts in by_role.items():
        features.update(_lengths(role, texts))
    return Observation(group=group, features=features, asked=_hashed_question(messages))


def _hashed_question(messages: Sequence[tuple[str, str]]) -> str:
    """Hash an episode's opening messages without the system prompt, as 16 hex digits; "" if there are no others."""
    question = [(role, text.strip()) for role, text in messages if role != Role.SYSTEM.value]
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16] if question else ""


def _segments(ids: Sequence[int], pieces: Callable[[int], bytes]) -> Iterator[str]:
    """Yield the texts between control tokens."""
    pending = b""
    for token in (*ids, None):
        piece = b"" if token is None else pieces(token)
        pending += piece
        if not piece and pending.strip():
            yield pending.decode(errors="replace").strip()
        pending = pending if piece else b""


def _lengths(role: str, texts: Sequence[str]) -> dict[str, Feature]:
    whole = "".join(texts)
    return {
        f"{role}.messages": float(len(texts)),
        f"{role}.chars": fmean(map(len, texts)),
        f"{role}.lines": fmean(text.count("\n") + 1 for text in texts),
        f"{role}.capitals": sum(map(str.isupper, whole)) / max(1, len(whole)),
        f"{role}.digits": sum(map(str.isdigit, whole)) / max(1, len(whole)),
        f"{role}.starts_small": fmean(text[:1].islower() for text in texts),
    }


def _words(name: str, text: str) -> dict[str, Feature]:
    """Return a feature for each of the text's most frequent words."""
    return {f"{name}.word:{word}": 1.0 for word, _ in Counter(_WORD.findall(text)).most_common(MAX_WORDS)}
