"""Chooses how the configured reward function is asked."""

from __future__ import annotations

from ostinato.reward.asking.inline import Inline
from ostinato.reward.asking.isolated import Isolated
from ostinato.reward.asking.loader import load
from ostinato.reward.asking.question import Asker
from ostinato.reward.config import RewardConfig

BUILT_IN = "ostinato.reward.functions:"


def asker_of(config: RewardConfig) -> Asker:
    """Built-in functions run in this process, others in one that can be killed. Raises BadConfig for a bad option of a built-in one."""
    if config.function.startswith(BUILT_IN):
        return Inline(load(config.function, config.options), max_abs=config.max_abs)
    return Isolated(
        config.function,
        config.options,
        answer_s=config.answer_s,
        load_s=config.load_s,
        max_abs=config.max_abs,
        memory_bytes=config.memory_bytes,
    )
