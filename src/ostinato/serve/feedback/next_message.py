"""Classifies what a person's next message says about the previous answer (implicit feedback), by rules. Pure; English only.

The rules prefer misses to false positives: a message that matches none of them only means that the conversation went on. Most rules
therefore look at how a sentence or a part of it begins: "it fails" is a complaint, "what if it fails?" and "test that it fails" are not.
The rules' version is recorded with each signal, so that signals from different versions can be told apart.

The patterns match lower-case words without punctuation, with contractions expanded ("does not" for "doesn't" and "doesnt").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

_FILLERS = (
    "ok|okay|please|pls|well|oh|ah|hey|hello|hm+|come on|seriously|unfortunately|sadly|i think|i am afraid|"
    "can you|could you|would you"
)
_NAMES = {
    "IT": r"(?:it|this|that|these|those|they|your \w+(?: \w+)?|"
    r"(?:that|this) (?:function|method|module|option|flag|import|file|package|api|class)|"
    r"the (?:answer|output|result|code|change|fix|test|patch|build|error|bug|layout|page|app|script|formatting)s?(?: you wrote)?)",
    "THAT": r"(?:it|this|that|them|these|those)",
    "AGAIN": r"(?:again|once more|one more time|over)",
    "WORK": r"(?:work|working|right|correct|help|helpful|what|compile|run|running|pass|passing|make|true|valid|fix|fixed|do|exist|"
    r"answer|match|solve|change|start|load|open|build|parse)",
    "BAD": r"(?:wrong|broken|useless|incorrect|terrible|nonsense|garbage|worse|off|gone|blank|failing|red|way too|far too|missing|"
    r"not what|the wrong)",
    "GONE": r"(?:broken|blank|gone|empty|missing|failing)",
    "TROUBLE": r"(?:error|problem|issue|result)",
    "DO": r"(?:use|touch|change|add|remove|edit|do|rename|delete|import|mock|write|create|explain|apologi[sz]e|print|rewrite|refactor|"
    r"repeat|make|include|put|install|commit|comment)",
}


def _begins(*patterns: str, after: str = "") -> re.Pattern[str]:
    """Compile a pattern for any of several beginnings, after filler words: `_FILLERS` and those in `after`."""
    joined = "|".join(patterns)
    for name, meaning in _NAMES.items():
        joined = re.sub(rf"\b{name}\b", lambda _, meaning=meaning: meaning, joined)
    return re.compile(rf"^(?:(?:{_FILLERS}{after}) )*(?:{joined})")


RETRY = _begins(
    r"(?:try|do|run|write|generate|answer|attempt) (?:THAT |the question )?AGAIN(?: but .*)?(?: please| pls)?$",
    r"(?:re ?try|redo|regenerate|again|once more|once again|same again)(?: THAT)?(?: again)?(?: but .*)?(?: please| pls)?$",
    r"(?:one more|another) (?:try|attempt|go|shot)(?: please| pls)?$|give THAT another (?:try|go|shot)",
    after="|no|nope|now|let us",
)
COMPLAINT = _begins(
    r"IT (?:(?:just|also|really|completely|totally|still) )*(?:does|do|did|is|are|was|were|can|will|has|have) "
    r"(?:still )?not (?:even )?(?:\w+ ){0,2}WORK\b",
    r"IT (?:is|are|was|were|looks?|seems?)(?: \w+ly| just| still| all| so| plain)* BAD\b(?! down| into)",
    r"IT (?:still |just |also )?(?:broke|breaks?|failed|fails?|crashed|crashes|throws?|threw|hangs?|freezes|froze|contradicts?|removed|"
    r"deleted|overwrote|lost)\b",
    r"(?:it|this|that) (?:was working|worked)(?: fine)? before\b|i (?:ran|tried|used|tested) (?:it|this|that)[\w ]* (?:and|but) it "
    r"(?:just )?(?:hangs?|crash\w*|fail\w*|does not|did not|throws?|broke)\b",
    r"IT (?:makes? (?:it|things|no)|made (?:it|things) (?:worse|slower))\b",
    r"the [\w ]{1,30} (?:is|are) (?:still )?(?:gone|broken|missing|blank)(?: now| again)?$",
    r"(?:now )?(?:the|everything|all)[\w ]{0,30} (?:is|are) (?:now )?GONE(?: now| again)?$",
    r"(?:bad|wrong) (?:answer|again)$|what a mess$|this is the (?:second|third|fourth|fifth) time\b|"
    r"there is an? (?:\w+ )?(?:error|bug|typo) in (?:line|what you|your)\b|did not (?:work|help|fix)\b",
    r"(?:nothing (?:happens|happened|changed|works)|there is no such)\b",
    r"(?:it |this |that |i )?still (?:does|do|is|are|not|wrong|fails?|failing|broken|crash\w*|get(?:ting)? (?:the|an?)|the same|"
    r"throws?|errors?|red|missing)\b",
    r"(?:i get |i am getting |it is )?the (?:exact )?same (?:TROUBLE|\w+error)(?: as before| again| here| now)?$",
    r"(?:exact )?same TROUBLE(?: as before| again| here)?$",
    r"(?:now )?i (?:still |now )?(?:get|got|see|am getting) (?:an? )?(?:\w+ )?(?:error|exception|segfault|traceback|\d{3})\b(?! with)",
    r"(?:now )?i am getting(?: now)?$",
    r"(?:\d+|the|all|some|most) (?:\w+ )?tests? (?:now )?(?:fail\b|failing|are (?:still |now )?(?:red|failing)|do not pass)",
    r"not (?:working|what i (?:asked|wanted|meant|said|need))|does not (?:work|compile|run|help)\b|no good$",
    r"(?:wrong|incorrect|nonsense|useless|wtf)(?: (?:again|still|file|function|answer|place|one|line|class|method))?$",
    r"you (?:just |also |completely |again )?(?:broke|ignored|deleted|removed|forgot|missed|skipped|misunderstood|duplicated|"
    r"hallucinated|invented|overwrote|misread|made it worse|changed the wrong|did not (?!call|mention)|have not|keep \w+ing)\b",
    r"you are (?:just |only )?(?:guessing|ignoring|hallucinating|making (?:this|things|it) up|not (?:reading|listening))\b",
    r"i (?:already )?(?:told you|asked you (?:for|to|not)|said (?:no|not|do|only|without|that|it))\b",
    r"i asked for (?!access|help)[\w ]{1,25}$",
    r"i (?:did not|never) (?:ask|want|say|mean)\b|i already (?:said|asked)\b|stop (?!using)\w+ing\b",
    r"why (?:did|would|are|do) you (?:keep |just )?(?:delet|remov|chang|rewrit|edit|touch|break|ignor|drop|undo)\w*",
    after="|no|nope|and|but|again|sorry|actually|wait",
)
CORRECTION = _begins(
    r"(?:actually|wait|sorry|hm+) (?:no|nope)\b|no no\b",
    r"actually (?:i meant|make|use|it (?:is|should|must)|change|keep|put|only|do not|let us not)\b",
    r"wait (?:that|the|it|not|you|i meant)\b|sorry (?:i meant|wrong|not)\b|i meant\b",
    r"i would (?:rather (?:have|you|use|keep|not)|prefer)\b|rather (?:use|write|make|put)\b|let us not\b|hold on (?:that|it|the)\b",
    r"(?:undo|revert|roll back|rollback|take back|restore) (?:THAT|the (?!\w+ button)|your|my|everything|all)(?: \w+){0,7}$",
    r"(?:let us )?go back to the (?:previous|old|first|last|original)\b|scratch that\b|not quite\b|i think you mis(?:read|understood)",
    r"(?:put|change|set|turn|roll|switch|bring|take) (?:THAT|everything|the [\w ]{1,20}|your \w+|\w+) back\b",
    r"(?:do not|never) DO\b(?!.* yet$)|leave [\w ]{1,20} as (?:it|they) (?:was|were)\b",
    r"keep the (?:old|existing|original|current|previous) (?:\w+ ){0,2}\w+$",
    r"instead (?!let us say|what|how|would|could|can|of )\w+|instead of (?!that what)[\w ]+ (?:make|use|do|put|write|return)\b",
    r"(?:use|make|do|put|return|write|call|take|go with|try|edit|change) [\w ']*\binstead(?: of [\w ']{1,25})?(?: please)?$",
    r"(?:it|this|that|the \w+|that \w+|they|should|must) ?(?:\w+ )?(?:is called|(?:should|must) (?:be|return)|should (?:go|stay|use)|"
    r"was supposed to be|needs to be|be|return) .{0,60}\bnot (?!only|just|necessarily|yet|sure)",
    r"it is called \w+ not\b|(?:the )?other way (?:a?round)\b|make (?:it|this|that) .*\bthis time$",
)
TAKING_BACK = re.compile(r"^(?:can|could|would) you (?:please )?(?:undo|revert|roll)")
NO = re.compile(
    r"^(?:hm+ |ok )*(?:no|nope|nah)\b"
    r"(?! (?:problem|worries|need|thanks|thank|rush|idea|more|less|matter|doubt|one|longer|i was|i do not have|"
    r"that is (?:fine|all|ok|good)))"
)
NOT = re.compile(r"^not (?:the|that|this|those|these|my) (?!it\b|i\b|we\b|much\b)\w+")
UNCLEAR = re.compile(
    r"\b(?:on purpose|anyway|(?:it|that|this) is (?:fine|ok|okay|good|great|expected)|feel free|no worries|do not worry|before you started|"
    r"in prod|in production|since (?:yesterday|last|this)|in the old|in my)\b|\b(?:as well|too)$"
)
"""Phrases that make a complaint unlikely: the person is content after all, or speaks of something other than the answer."""

OPPOSED = re.compile(r"^not (?!only|just|necessarily|yet|sure|that i)\w+")
OPPOSING = re.compile(
    r"^(?:please )?(?:use|i want(?:ed)?|i need(?:ed)?|it|that|this|the \w+|they|should|must|put|in) |^(?:no|nope|actually) "
)
THANKS = re.compile(
    r"\b(?:thanks|thank you|thx|ty|danke|cheers|great|perfect|awesome|excellent|nice|lovely|brilliant|beautiful|wonderful|amazing|"
    r"super|exactly|well done|lgtm|looks good|good (?:job|work|one|catch|bot)|love (?:it|this)|"
    r"(?:it|that|this) (?:works|worked|did it|did the trick|fixed it|helped)|works|sweet|lifesaver|kudos|legend)\b"
)
PRAISE_WORDS = frozenset(
    (  # noqa: SIM905 (a list of words reads better)
        "a again ah all amazing and answer awesome beautiful bot brilliant catch charm cheers cool danke did done excellent exactly "
        "exciting explanation fast finally fixed for good great green help helped hey i is it job lgtm like looking looks lot love lovely "
        "man mate me merging much my needed nice now of oh ok okay one perfect perfectly quick really so solution super thank thanks that "
        "the this thx to ty very wanted was well what wonderful work worked works wow yeah yep yes you are clean kudos legend lifesaver "
        "neat pass passes sweet tests trick"
    ).split()
)
"""The words that a message of pure praise may consist of."""

TOPIC = re.compile(
    r"^(?:(?:ok|okay|thanks|thank you|great|perfect|cool|alright|now|so|that is done|something) )*(?:a |one )?"
    r"(?:(?:new|(?:completely |totally )?different|another|next|other|unrelated|separate) (?:(?:unrelated|small|quick) )?"
    r"(?:topic|question|task|thing|issue|problem|subject|request)\b|"
    r"different now\b|next up\b|moving on\b|unrelated\b(?! to)|switching (?:to|gears)|on another note|changing the (?:subject|topic)|"
    r"let us (?:move on|switch|talk about|now do|do something else)|forget (?:about )?(?:it|this|that)$)"
)
STOP_WORDS = frozenset(
    (  # noqa: SIM905
        "a again an and are can could do for hello hey hi i in is it just me my now of ok okay on please pls so that the this to us we "
        "what which will would you your"
    ).split()
)
"""Words that are ignored when two requests are compared."""


# ---------------------------------------------------------------- rules

VERSION = "rules@2"
_MOST_WORDS = 60  # words that are read; complaints come early, and longer text is mostly pasted material
_MOST_CHARS = 800
_MAX_PRAISE_WORDS = 10  # most words of a message of pure praise
_MAX_COMPLAINT_WORDS = 40  # most words of a complaint or correction; longer messages have another purpose
_MIN_REPEATED_WORDS = 3  # fewest meaningful words of a request that can be recognised as a repetition
_SENTENCES = re.compile(r"(?<![.!?])([.!?]+)(?=\s|$)|\n+")
_PARTS = re.compile(r"(?<![,;:()])[,;:()]+(?=\s|$)|\s(?=\()|\s-+\s|(?<!\s)\s+[\u2013\u2014]\s*|[\u2013\u2014]\s*")
_QUOTED = re.compile(r"\"[^\"\n]*\"|\u201c[^\u201d\n]*\u201d|`[^`\n]*`")
_NOISE = re.compile(r"[^\w' ]+")
_SPACES = re.compile(r"\s+")
_SHORTENED = re.compile(r"\b(do|does|did|is|was|are|were|has|have|had|ca|could|wo|would|should)(?:n'?t)\b")
_IS = re.compile(r"\b(it|that|this|there|here|what|he|she)'s\b")


class NextMessage(StrEnum):
    """The kind of a next message. `GOES_ON`: no rule matches."""

    RETRY = "retry"
    CORRECTION = "correction"
    COMPLAINT = "complaint"
    PRAISE = "praise"
    TOPIC = "new topic"
    GOES_ON = "goes on"


DISSATISFIED = frozenset({NextMessage.RETRY, NextMessage.CORRECTION, NextMessage.COMPLAINT})


class _Part(NamedTuple):
    """A part of a sentence, normalised by `_plain`. `asks`: the sentence is a question."""

    words: str
    asks: bool


def kind_of(message: str, before: str, answer: str = "") -> NextMessage:
    """Return the kind of a message that followed `answer` to the request `before`; all three as the person typed or saw them.

    If the answer ended in a question, "no" and "not that" are replies to it and not corrections.

    Example: ``kind_of("No, use pathlib instead.", "Read the file.") is NextMessage.CORRECTION``
    """
    parts = list(_parts_of(message))
    if not parts:
        return NextMessage.GOES_ON
    first = parts[0].words
    whole = " ".join(part.words for part in parts)
    asked = _asks(answer)
    if RETRY.search(whole) or _same(message, before):
        return NextMessage.RETRY
    if _praises(whole, parts):
        return NextMessage.PRAISE
    if any(TOPIC.search(words) for words in (whole, *(part.words for part in parts[:2]))):
        return NextMessage.TOPIC
    if len(whole.split()) > _MAX_COMPLAINT_WORDS or UNCLEAR.search(whole):
        return NextMessage.GOES_ON
    if any(_complains(part) for part in parts):
        return NextMessage.COMPLAINT
    if _corrects(first, parts, whole, asked=asked):
        return NextMessage.CORRECTION
    return NextMessage.GOES_ON


def _complains(part: _Part) -> bool:
    if part.asks and not part.words.startswith("why "):
        return False
    return COMPLAINT.search(part.words) is not None


def _corrects(first: str, parts: Sequence[_Part], whole: str, *, asked: bool) -> bool:
    """True if the message changes what was done. A question does so only if it asks to undo something."""
    if parts[0].asks and len(parts) == 1:
        return TAKING_BACK.search(first) is not None and bool(CORRECTION.search(first))
    if not asked and ((NO.search(whole) and len(whole.split()) > 1) or NOT.search(first)):
        return True
    if any(CORRECTION.search(words) for words in (first, whole)) and not (asked and first.startswith(("not", "no "))):
        return True
    return not asked and any(
        OPPOSING.search(one.words) and OPPOSED.search(other.words) and not other.asks
        for one, other in pairwise(parts[:2])
    )


def _praises(whole: str, parts: Sequence[_Part]) -> bool:
    words = whole.split()
    asks = any(part.asks for part in parts)
    return (
        not asks
        and len(words) <= _MAX_PRAISE_WORDS
        and THANKS.search(whole) is not None
        and PRAISE_WORDS.issuperset(words)
    )


def _asks(answer: str) -> bool:
    """True if an answer ends in a question."""
    return answer.rstrip(" \t\n\"'`*_)]}").endswith("?")


def _same(message: str, before: str) -> bool:
    """True if two requests have the same words apart from stop words, and enough of them."""
    one, other = ([word for word in _plain(text).split() if word not in STOP_WORDS] for text in (message, before))
    return len(one) >= _MIN_REPEATED_WORDS and one == other


def _parts_of(message: str) -> Iterator[_Part]:
    """Yield the parts of the sentences, up to about `_MOST_WORDS` words. Quoted text is skipped, since it is not the person's own."""
    bare = _QUOTED.sub(" ", message[:_MOST_CHARS].replace("\u2019", "'"))
    left, at = _MOST_WORDS, 0
    for end in (*_SENTENCES.finditer(bare), None):
        sentence = bare[at : end.start()] if end else bare[at:]
        asks = end is not None and "?" in end.group()
        at = end.end() if end else len(bare)
        for piece in _PARTS.split(sentence):
            words = _plain(piece)
            if words and left > 0:
                left -= len(words.split())
                yield _Part(words, asks)


def _plain(text: str) -> str:
    """Return the text in lower case on one line, without punctuation, with contractions such as "doesn't" and "dont" expanded."""
    lowered = _SHORTENED.sub(r"\1 not", text.lower().replace("\u2019", "'"))
    lowered = lowered.replace("ca not", "can not").replace("wo not", "will not")
    lowered = (
        _IS.sub(r"\1 is", lowered)
        .replace("i'm ", "i am ")
        .replace("you're ", "you are ")
        .replace("i'd ", "i would ")
        .replace("let's", "let us")
        .replace("lets ", "let us ")
    )
    return _SPACES.sub(" ", _NOISE.sub(" ", lowered)).strip().replace(" '", " ")
