"""A task's prompt to the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompt:
    r"""A task's request to the endpoint: the model continues the text of the last message, up to `stop`.

    Example::

        TaskPrompt(messages=({"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}), max_tokens=4,
               stop=(",", "\n"))
    """

    messages: tuple[dict[str, str], ...]
    max_tokens: int
    stop: tuple[str, ...]
