"""Compiles grammars for one tokenizer: a matcher says which tokens may come next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ostinato.core.errors import BadRequest

MAX_GRAMMAR_CHARS = 100_000
REFUSED = "The format, or the parameters of a tool that must be called, cannot be held to: "
_KEPT = 32  # compiled grammars; the memory of each is bounded by its trial
_LIMITS = LLParserLimits(step_lexer_fuel=20_000, step_max_items=5_000)
"""Limits on the cost of one token's mask, for which every stream of a step waits. 60 tools of eight arguments take 0.2 ms and come nowhere
near the limits; grammars beyond them have cost up to 40 ms, and an answer that reaches them ends there.
"""


class Grammars:
    """Compiles grammars for one tokenizer; the last ones are cached. Safe to share between threads.

    Compiling has no limits on time, memory and stack, so a grammar from outside is tried first (`trial.py`).

    Args:
        tokenizer: with its control tokens, as JSON.
        vocab_size: the number of the model's logits.
        stop_ids: the tokens that may end an answer once the grammar is satisfied.
    """

    def __init__(self, tokenizer: str, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._tokens = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(stop_ids))
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def has(self, grammar: str) -> bool:
        """True if the compiled grammar is cached."""
        with self._lock:
            return grammar in self._kept

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an answer. Raises BadRequest for an invalid grammar, or one that is too large."""
        with self._lock:
            made = self._kept.get(grammar)
        if made is None:
            made = self.compiled(grammar)
        with self._lock:
            self._kept[grammar] = made
            self._kept.move_to_end(grammar)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def forget(self, grammar: str) -> None:
        """Drop a grammar of which a matcher has failed: all its copies share one lexer, and fail with it from then on."""
        with self._lock:
            self._kept.pop(grammar, None)

    def accepts(self, grammar: str, ids: Sequence[int]) -> bool:
        """True if an answer of these tokens, with or without its stop token, follows the grammar to its end. Raises BadRequest."""
        matcher = self.matcher(grammar)
        accepted = matcher.consume_tokens(list(ids)) and (matcher.is_stopped() or matcher.is_accepting())
        if matcher.is_error():
            self.forget(grammar)
            return False
        return accepted

    def compiled(self, grammar: str) -> LLMatcher:
        """A matcher that is not cached. Raises BadRequest."""
        check_text(grammar)
        made = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS)
        tried = made.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # the first mask is often the most expensive: no stream waits for it here
        if tried.is_error():
            why = " ".join(tried.get_error().split())[:500]
            raise BadRequest(REFUSED + why)
        return made


def check_text(grammar: str) -> None:
    """Raise BadRequest for a grammar that is too long, or not valid text."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"the grammar of the answer has {len(grammar)} characters; send {MAX_GRAMMAR_CHARS} at most")
    try:
        grammar.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("a tool's name holds half of a surrogate pair, which is not text", field="tools") from error
