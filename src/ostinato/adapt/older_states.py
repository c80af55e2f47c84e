"""People's states as the version before packed them: without what the CUSUM came to, and each rated answer in one piece."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from ostinato.adapt.learner import PersonState, Prior, Rated, Regression, checked, unpacked_head, window
from ostinato.core.errors import Corrupt

OLDER_FORMAT = 2
_RATED = struct.Struct("<QB")  # an answer's place and number of signals; its features and signals follow
_SIGNAL = struct.Struct("<Ie")


def older_state(data: bytes, prior: Prior, regression: Regression) -> PersonState:
    """A state of the version before, `ready`, with no more answers one by one than are kept now. Raises Corrupt for damaged bytes."""
    packed = checked(data, OLDER_FORMAT)
    try:
        state = _read(packed)
    except (struct.error, ValueError) as error:
        raise Corrupt(f"a person's state and its counts disagree: {error}") from error
    own, kept = state.prior(prior, regression), window(state.dials)
    while len(state.recent) > kept:
        settled = state.settled.then(state.recent[0], own, regression)
        state = replace(state, settled=settled, settled_at=state.recent[0].place, recent=state.recent[1:])
    return state.ready(own, regression)


def _read(packed: bytes) -> PersonState:
    """From bytes without their CRC-32. Raises struct.error and ValueError if they are not as long as their counts say."""
    fields, count, at = unpacked_head(packed, 0)
    dials, recent = len(fields["settled"].shift_D) - 1, list[Rated]()
    for _ in range(count):
        place, signals = _RATED.unpack_from(packed, at)
        features_K = np.frombuffer(packed, "<f2", dials, at + _RATED.size).astype(np.float16)
        at += _RATED.size + features_K.nbytes
        end = at + signals * _SIGNAL.size
        recent.append(Rated(place, features_K, tuple(_SIGNAL.iter_unpack(packed[at:end]))))
        at = end
    if at != len(packed):
        raise ValueError(f"{len(packed)} bytes instead of {at}")
    return PersonState(**fields, recent=tuple(recent))
