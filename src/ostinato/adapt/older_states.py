"""Reads people's states in the previous packed format: without the CUSUM's outcome, and with each rated answer in one piece."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from ostinato.adapt.learner import PersonState, Prior, Rated, Regression, checked, unpacked_head, window
from ostinato.core.errors import Corrupt

OLDER_FORMAT = 2
_RATED = struct.Struct("<QB")  # an answer's place and number of signals, followed by its features and signals
_SIGNAL = struct.Struct("<Ie")


def older_state(data: bytes, prior: Prior, regression: Regression) -> PersonState:
    """Return a state of the previous format, `ready`, with no more single answers than are kept now. Raises Corrupt for damaged bytes."""
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
    """Parse bytes without their CRC-32. Raises struct.error and ValueError if they are not as long as their counts say."""
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
