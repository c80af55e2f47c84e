"""How the time of a computation grows with its input: a check that neither the speed nor the load of a machine decides."""

import time
from collections.abc import Callable
from typing import Any

TIMES = 8
"""How many times as long the larger input is: linear work takes about 8 times as long, quadratic work 64 times."""
_ALLOWED, _NOISE_S = 24, 0.05


def grows_with_its_input(work: Callable[[Any], object], small: Any, large: Any) -> bool:
    """True if `large`, TIMES as long as `small` or longer, takes at most 24 times as long: CPU seconds, the quickest of three.

    Once `large` was quick enough, it is not tried again: the quickest of three would be, too.
    """
    allowed = _ALLOWED * min(_seconds(work, small) for _ in range(3)) + _NOISE_S
    return any(_seconds(work, large) < allowed for _ in range(3))


def _seconds(work: Callable[[Any], object], value: Any) -> float:
    began = time.thread_time()
    work(value)
    return time.thread_time() - began
