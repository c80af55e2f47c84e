"""What a person's next message says about the answer before it, by rules. Pure; English only.

The rules would rather miss than be wrong: a message that fits none of them says only that the conversation went on. Their version is
told with each signal, so that what was heard by other rules can be told apart.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from enum import StrEnum

from ostinato.core.conversation import Conversation, Role

VERSION = "rules@1"
INTERRUPTION = "[Request interrupted by user"  # Claude Code's, where somebody pressed Escape
_TAG = re.compile(
    r"<(?P<closes>/?)(?P<name>[a-z][a-z_-]{0,63})>"
)  # of reminders, environments, instructions, a command's output
_NOISE = re.compile(r"[^\w' ]+")
_SPACES = re.compile(r"\s+")
_MOST_CHARS = 1_000  # of what was typed that are read
_MOST_SENT = 50_000  # characters of a message in which it is looked for
_SHORT = 6  # words of a message that only praises
_ALIKE = 0.8  # share of words that a request said again has in common with the first, by Jaccard
_FEWEST = 3  # words that a request has that can be told from another


class Next(StrEnum):
    """What the next message is. `GOES_ON`: nothing that the rules know."""

    RETRY = "retry"
    CORRECTION = "correction"
    COMPLAINT = "complaint"
    PRAISE = "praise"
    TOPIC = "new topic"
    GOES_ON = "goes on"


DISSATISFIED = frozenset({Next.RETRY, Next.CORRECTION, Next.COMPLAINT})


def _any(*patterns: str) -> re.Pattern[str]:
    """One of several patterns: "IT", "NOT" and "THAT" in them stand for these."""
    it = (
        r"(?:it|this|that|these|those|they|which|your \w+(?: \w+)?|"
        r"the (?:answer|output|result|code|change|fix|test|patch|build|error|bug)s?)"
    )
    joined = "|".join(patterns).replace("NOT", r"(?:n't|nt|not| not|never)").replace("THAT", r"(?:it|this|that)")
    return re.compile(joined.replace("IT", it))


_RETRY = _any(
    r"^(?:ok |okay |please |pls |hm+ |no |nope )*(?:try|do|run|write|generate|answer) (?:THAT )?(?:again|once more|one more time|over)\b",
    r"^(?:ok |okay |please |pls |hm+ |no |nope )*(?:re-?try|redo|regenerate|re-?do it|again)(?: please| pls)?$",
    r"^(?:ok |okay |please |pls |hm+ |no |nope )*(?:(?:one more|another) (?:try|attempt)\b|give it another)",
)
_COMPLAINT = _any(
    r"\bstill (?:doesNOT|doNOT|isNOT|not|wrong|fail|broken|crash|get|see|the same|throws?|errors?|red|missing|happen)",
    r"\bIT (?:(?:just |also |really |completely |totally )*(?:does|do|did|is|are|was|were|ca|wo)NOT\b.{0,40}"
    r"(?:work|right|correct|help|what i|compile|run|pass|make sense|true|even|what we|fix))",
    r"\bIT (?:is|are|was|were|looks|look|seems)(?: just| still| completely| totally| all| so| plain| simply)* "
    r"(?:wrong|broken|useless|incorrect|terrible|nonsense|bad|garbage|worse)",
    r"\bIT (?:broke|breaks|failed|fails|crashed|crashes)\b",
    r"\b(?:not|n't|nt) what i (?:asked|wanted|meant|said|need)",
    r"\byou (?:broke|ignored|deleted|removed|forgot|missed|skipped|misunderstood|made it worse|changed the wrong|didNOT|haveNOT|"
    r"areNOT listening|keep)\b",
    r"\bi (?:said|told you|already (?:said|told|asked)|asked (?:you|for)|did(?:n't|nt| not) (?:ask|want|say|mean))\b",
    r"\b(?:wtf|useless|same error|made things worse)\b",
    r"\bstop (?:doing|changing|adding|making|guessing|inventing|apologi[sz]ing)\b",
    r"^(?:wrong|incorrect|nonsense|not working|does(?:n't|nt| not) work|no good|that's not)\b",
    r"\bwhy (?:did|would|are|do) you\b",
)
_CORRECTION = _any(
    r"^(?:no|nope|nah|wait|actually|rather|instead|hm+|sorry)\b"
    r"(?! (?:problem|worries|need|thanks|thank|i (?:was|meant to)|never ?mind))",
    r"\bi meant\b|\binstead of\b|\binstead$|^not\b",
    r"\b(?:undo|revert|roll back|take back|put back|change back|restore) (?:THAT|the|your|my|everything|those|these)\b",
    r"\b(?:put|change|set|turn) (?:THAT|them) back\b",
    r"\b(?:should|must|was supposed to|were supposed to|needs? to) (?:be|have been|return|use|go|stay)\b.{0,60}\bnot\b",
    r"\b(?:don't|do not|dont|please don't|never) (?:use|touch|change|add|remove|edit|do|rename|delete|import|mock|write)\b",
)
_PRAISE = _any(
    r"^(?:ok |okay |ah |oh |wow |cool |and |yes |yeah |yep |hey )*(?:thanks|thank you|thx|ty|great|perfect|awesome|excellent|nice|lovely|"
    r"brilliant|beautiful|exactly|amazing|well done|good (?:job|work|one|catch)|lgtm|looks good|"
    r"THAT (?:works|worked|did it|fixed it|is perfect|is great|looks (?:good|great))|works(?: now| great| perfectly)?$)"
)
_TOPIC = _any(
    r"^(?:ok |okay |thanks |thank you |great |perfect |cool |alright |now |so )*(?:a |one )?"
    r"(?:new|different|another|next|other|unrelated|separate) (?:topic|question|task|thing|issue|problem|subject|request)",
    r"^(?:ok |okay |thanks |thank you |great |perfect |cool |alright |now |so )*"
    r"(?:next up\b|moving on\b|unrelated\b|switching (?:to|gears)|"
    r"(?:let's|lets) (?:move on|switch|talk about|now do|do something else)|forget (?:about )?THAT\b)",
)
_BUT = _any(r"\b(?:but|however|except|although|though|only)\b")


def typed(text: str) -> str:
    """What a person typed of a user's message: without the blocks in tags that agents put there, and their notes in brackets."""
    bare = " ".join(_outside(text[:_MOST_SENT]))
    lines = [line for line in bare.splitlines() if not line.strip().startswith(INTERRUPTION)]
    return "\n".join(lines).strip()[:_MOST_CHARS]


def _outside(text: str) -> Iterator[str]:
    """The pieces of a text that stand in no block between a tag and the next that closes it."""
    tags = list(_TAG.finditer(text))
    closings: dict[str, list[int]] = {}
    for tag in tags:
        if tag["closes"]:
            closings.setdefault(tag["name"], []).append(tag.end())
    at = 0
    for tag in tags:
        ends = closings.get(tag["name"], [])
        if tag["closes"] or tag.start() < at or not ends or ends[-1] < tag.end():
            continue
        yield text[at : tag.start()]
        at = ends[bisect(ends, tag.end())]
    yield text[at:]


def interrupted(text: str) -> bool:
    """True if an agent says that the person stopped the answer before."""
    return INTERRUPTION in text[:_MOST_SENT]


def asked_before(conversation: Conversation, known: int) -> str:
    """What a person typed last among the first `known` messages."""
    said = (typed(each.text) for each in reversed(conversation.messages[:known]) if each.role is Role.USER)
    return next((text for text in said if text), "")


def kind_of(message: str, before: str) -> Next:
    """What a message is, that followed an answer to the request `before`; both as `typed`.

    Example: ``kind_of("No, use pathlib instead.", "Read the file.") is Next.CORRECTION``
    """
    plain = _plain(message)
    if _RETRY.search(plain) or _alike(plain, _plain(before)):
        return Next.RETRY
    if _PRAISE.search(plain) and len(plain.split()) <= _SHORT and not _BUT.search(plain):
        return Next.PRAISE
    if _TOPIC.search(plain):
        return Next.TOPIC
    if _COMPLAINT.search(plain):
        return Next.COMPLAINT
    if _CORRECTION.search(plain):
        return Next.CORRECTION
    return Next.GOES_ON


def _plain(text: str) -> str:
    """Lower case, one line, without punctuation but apostrophes."""
    return _SPACES.sub(" ", _NOISE.sub(" ", text.lower().replace("\u2019", "'"))).strip()


def _alike(one: str, other: str) -> bool:
    words, others = set(one.split()), set(other.split())
    return len(words) >= _FEWEST and len(words & others) >= _ALIKE * len(words | others)
