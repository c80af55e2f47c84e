"""Observations of conversations: the prompts, tools and users that a model sees, and their timing. Pure.

The operator's own words (the system prompt, tools) are features themselves. Of what people wrote only the shape is a feature, and a hash
of it all identifies the question. The hash leaves out the operator's words, which belong to the environment and not to the task.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from ostinato.core.conversation import Conversation, Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import Turn
from ostinato.worlds.fidelity.observation import Feature, Observation

MOST_WORDS = 400
_ROLES = frozenset(role.value for role in Role)
_WORD = re.compile(r"[A-Za-z_/.-]{3,40}")


def of_conversation(conversation: Conversation, group: str) -> Observation:
    """Observe what a harness asks: the operator's own words by name (system prompt, tools), people's words by their shape only."""
    said: dict[Role, list[str]] = defaultdict(list)
    for message in conversation.messages:
        said[message.role].append(message.text)
    features: dict[str, Feature] = {
        "tools": float(len(conversation.tools)),
        "messages": float(len(conversation.messages)),
    }
    for tool in conversation.tools:
        features[f"tool:{tool.name}"] = 1.0
        features[f"tool.chars:{tool.name}"] = float(len(tool.description) + len(json.dumps(tool.parameters)))
    features.update(_words("system", " ".join(said[Role.SYSTEM])))
    for role, texts in said.items():
        features.update(_lengths(role.value, texts))
    asked = _hashed_question([(message.role.value, message.text) for message in conversation.messages])
    return Observation(group=group, features=features, asked=asked)


def of_turns(turns: Sequence[Turn], pieces: Callable[[int], bytes], group: str) -> Observation:
    """Observe an episode's captured turns, oldest first: the first prompt split at control tokens, lengths, and times between turns.

    `pieces` maps a token to its bytes, b"" for a control token. Raises BadRequest if there is no turn.
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
    spoken: list[tuple[str, str]] = []
    for part in parts:
        role, _, text = part.partition("\n")
        spoken.append((role, text) if role in _ROLES else ("other", part))
        by_role[spoken[-1][0]].append(spoken[-1][1])
    features.update(_words("system", " ".join(by_role.get("system", ()))))
    for role, texts in by_role.items():
        features.update(_lengths(role, texts))
    return Observation(group=group, features=features, asked=_hashed_question(spoken))


def _hashed_question(spoken: Sequence[tuple[str, str]]) -> str:
    """A hash, as 16 hex digits, of an episode's opening messages without the system prompt; "" if there are no others."""
    question = [(role, text.strip()) for role, text in spoken if role != Role.SYSTEM.value]
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16] if question else ""


def _segments(ids: Sequence[int], pieces: Callable[[int], bytes]) -> Iterator[str]:
    """The text between control tokens."""
    held = b""
    for token in (*ids, None):
        piece = b"" if token is None else pieces(token)
        held += piece
        if not piece and held.strip():
            yield held.decode(errors="replace").strip()
        held = held if piece else b""


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
    """A feature for each word of a text; only the most frequent words of a long text."""
    return {f"{name}.word:{word}": 1.0 for word, _ in Counter(_WORD.findall(text)).most_common(MOST_WORDS)}
