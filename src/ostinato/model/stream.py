"""Incremental detokenization: turns sampled ids into the text that may be shown now: whole characters that cannot become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.core.errors import BadRequest

_UNFINISHED = "\ufffd"
_WINDOW = 16  # number of ids at which the window is shortened
_KEEP = range(8, 12)  # ids that remain: of four neighbouring cuts, one falls between two characters
# While the last character of a run of byte tokens is incomplete, some decoders turn the whole run into replacement characters,
# so the run is held back. A run longer than _RUN is invalid UTF-8 anyway: only its last _SEQUENCE bytes can still change.
_RUN, _SEQUENCE = 24, 3


class TextStream:
    """The incremental text of one sample. All shown text, joined, equals the decoded text up to the first stop string.

    "First" is the stop string that is complete earliest, so the result does not depend on how the tokens are grouped. Each call
    decodes a bounded window, not the whole text. Exact for byte-level tokenizers; exact for byte-fallback tokenizers (SentencePiece) as
    long as the bytes are valid UTF-8.

    Example::

        stream = TextStream(renderer.decode, stop=("END",))
        shown = stream.feed([5, 6]) + stream.feed([7]) + stream.flush()
        stream.stopped  # True if "END" came
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise BadRequest("a stop string must not be empty", field="stop")
        self._decode = decode
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._ids: list[int] = []  # the window
        self._given = 0  # characters of the window's text already taken
        self._held = ""  # taken but not shown: possibly the beginning of a stop string
        self.stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """Add new ids; return the text that may be shown now. Ids after a stop string are ignored."""
        if self.stopped:
            return ""
        self._ids.extend(ids)
        text = self._decode(self._ids)
        run = len(text) - len(text.rstrip(_UNFINISHED))
        stable = max(len(text) - (run if run <= _RUN else _SEQUENCE), self._given)
        new, self._given = text[self._given : stable], stable
        if len(self._ids) >= _WINDOW and (run == 0 or run > _RUN):
            self._shrink(text)
        return self._show(new)

    def flush(self) -> str:
        """Return the remaining text at the end of the sample."""
        if self.stopped:
            return ""
        new = self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        shown = self._show(new)
        if self.stopped:
            return shown
        shown, self._held = shown + self._held, ""
        return shown

    def _shrink(self, text: str) -> None:
        """Drop the window's oldest ids if the newest ones alone decode to the same end of the text."""
        for keep in _KEEP:
            end = self._decode(self._ids[-keep:])
            given = self._given - (len(text) - len(end))
            if given >= 0 and text.endswith(end):
                self._ids, self._given = self._ids[-keep:], given
                return

    def _show(self, new: str) -> str:
        text = self._held + new
        hit = self._first_stop(text)
        if hit is not None:
            self.stopped, self._held = True, ""
            return text[:hit]
        held = self._could_begin(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _first_stop(self, text: str) -> int | None:
        """Return the start of the stop string that ends first, or None; of several that end together, the longest."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _could_begin(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a stop string."""
        longest = min(self._longest - 1, len(text))
        ends = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop))
        return next(ends, 0)
