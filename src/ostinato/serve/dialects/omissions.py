"""Parts of a request that the model does not get although the request is taken, each told to the caller in a response header."""

from __future__ import annotations

from collections.abc import Sequence

_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "document",
    "input_file": "document",
    "container_upload": "document",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
"""What the parts of these types are, in all dialects."""

MEDIA_TYPES = frozenset(_MEDIA)


class Omissions:
    """Collects what is left out of one request, as words of the header `X-Ostinato-Omitted`, each once.

    Example: ``omissions.media("image_url") == "[image omitted: this model reads text only]"``
    """

    def __init__(self) -> None:
        self._words: dict[str, None] = {}

    @property
    def words(self) -> Sequence[str]:
        """What was left out, in the order in which it was met."""
        return [*self._words]

    def add(self, word: str) -> None:
        """Note an omission: a word of ASCII letters, digits and hyphens."""
        self._words[word] = None

    def media(self, type: str) -> str:
        """Note a part that is no text, of one of `MEDIA_TYPES`; returns the text that the model gets in its place."""
        kind = _MEDIA[type]
        self.add(kind)
        return f"[{kind} omitted: this model reads text only]"
