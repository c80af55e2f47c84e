"""People's states as the version before packed them: without what the CUSUM came to, and each rated answer in one piece."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from ostinato.adapt.learner import Evidence, PersonState, Prior, Rated, Regression, checked, window
from ostinato.core.errors import Corrupt

OLDER_FORMAT = 2
_HEAD = struct.Struct("<BBBBBHHIffQQQ16s")
_RATED = struct.Struct("<QB")  # an answer's place and number of signals; its features and signals follow
_SIGNAL = struct.Struct("<Ie")
_PRIVATE = 1 << 7  # a bit beside the number of strikes


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
    _, dials, count, flags, reported, mask, resets, ratings, cusum, nats, settled_at, reset_at, cursor, names = (
        _HEAD.unpack_from(packed)
    )
    size, numbers, at = dials + 1, [dial for dial in range(dials) if mask >> dial & 1], _HEAD.size
    triangle = size * (size + 1) // 2
    told = np.frombuffer(packed, "<f4", triangle + size + len(numbers), at).astype(np.float32)
    at += told.nbytes
    precision_DD = np.zeros((size, size), np.float32)
    precision_DD[np.tril_indices(size)] = told[:triangle]
    precision_DD += np.tril(precision_DD, -1).T
    recent = list[Rated]()
    for _ in range(count):
        place, signals = _RATED.unpack_from(packed, at)
        features_K = np.frombuffer(packed, "<f2", dials, at + _RATED.size).astype(np.float16)
        at += _RATED.size + features_K.nbytes
        end = at + signals * _SIGNAL.size
        recent.append(Rated(place, features_K, tuple(_SIGNAL.iter_unpack(packed[at:end]))))
        at = end
    if at != len(packed):
        raise ValueError(f"{len(packed)} bytes instead of {at}")
    return PersonState(
        names=names.hex(),
        settled=Evidence(precision_DD, told[triangle : triangle + size], ratings, cusum, resets, reset_at),
        settled_at=settled_at,
        recent=tuple(recent),
        held=tuple(zip(numbers, told[triangle + size :].tolist(), strict=True)),
        strikes=flags & (_PRIVATE - 1),
        reported=reported,
        nats=nats,
        cursor=cursor,
        private=bool(flags & _PRIVATE),
    )
