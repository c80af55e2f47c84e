"""What the version before kept of people is taken over where the log no longer has it."""

import struct
import zlib
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.adapt.people import BASIS, RULES, about, cache_at, folded, set_dials, steered_turn

from ostinato.adapt.learner import MOST_BYTES, PersonState, Rated, names_hash, window
from ostinato.adapt.older_states import _RATED, _SIGNAL, OLDER_FORMAT, older_state
from ostinato.adapt.prior import flat_prior
from ostinato.core.errors import Corrupt
from ostinato.core.records import SteeringBasis
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.person_cache import PersonCacheView

ANN, BOB = ("acme", "ann"), ("acme", "bob")
HEAD = struct.Struct("<BBBBBHHIffQQQ16s")
STATE = b64decode(
    "AgMDgQECAAAABgAAAM4Emz0zMzM/CAAAAAAAAAACAAAAAAAAAAcAAAAAAAAAB7Hu6lgXSBYLRKNNDEzD5BYlukOayl1BSA0ERAAAAAAAAAAAAAAA"
    "ALEYE8B0ry3CAAAAAKrM1EGymtBB5AuCwQAAAAB8fGRBAAAAPwkAAAAAAAAAAdHA1Dn4xAEAAAAAPAoAAAAAAAAAAZ/CWsCxwAEAAAAAAAsAAAAA"
    "AAAAApEuFERZQwIAAAAAPAMAAAAAfgTq2yA="
)
"""Packed by the version before: a dial held, a strike, a violation and six ratings before one was cleared, three since then."""
HASH = "235178f486e045d07377620c23f42cc1"
"""Of `RULES`, by the version before."""
MEANS = [0.03841747, 0.02503853, -0.0035633, 0.55544105]
"""Of the posterior of `STATE`, as the version before read it."""


def packed_before(state: PersonState) -> bytes:
    """As the version before packed it."""
    settled = state.settled
    parts = [
        HEAD.pack(
            OLDER_FORMAT, state.dials, len(state.recent), state.strikes | state.private << 7, state.reported,
            sum(1 << dial for dial, _ in state.held), settled.resets, settled.ratings, settled.cusum, state.nats,
            state.settled_at, settled.reset_at, state.cursor, bytes.fromhex(state.names),
        ),
        settled.precision_DD[np.tril_indices(state.dials + 1)].tobytes(),
        settled.shift_D.tobytes(),
        np.array([value for _, value in state.held], np.float32).tobytes(),
    ]  # fmt: skip
    for rated in state.recent:
        parts += [_RATED.pack(rated.place, len(rated.signals)), rated.features_K.tobytes()]
        parts += [_SIGNAL.pack(*each) for each in rated.signals]
    return b"".join(parts) + zlib.crc32(b"".join(parts)).to_bytes(4, "little")


def test_a_state_of_the_version_before_is_read_as_it_was_and_packed_anew() -> None:
    state = older_state(STATE, RULES.prior, RULES.regression)
    assert packed_before(state) == STATE
    assert (state.held, state.strikes, state.reported, state.private) == (((1, 0.5),), 1, 1, True)
    assert [rated.reward for rated in state.recent] == [1.0, 0.0, 1.0]
    assert (state.settled.ratings, state.settled_at, state.cursor) == (6, 8, 7)
    assert state.posterior(RULES.prior, RULES.regression).mean_D == pytest.approx(MEANS, abs=1e-7)
    again = PersonState.unpack(state.pack(), RULES.regression)
    assert packed_before(again) == STATE


@pytest.mark.parametrize(("dials", "before"), [(4, 21), (7, 16), (9, 13), (11, 10)])
def test_an_answer_more_than_is_kept_now_goes_into_the_sums(dials: int, before: int) -> None:
    rng, prior = np.random.default_rng(dials), flat_prior(dials)
    signals = tuple((number, 1.0) for number in range(4))
    recent = tuple(Rated(place, rng.normal(size=dials).astype(np.float16), signals) for place in range(1, before + 1))
    old = replace(PersonState.new(names_hash([*"abcdefghijk"[:dials]]), dials), recent=recent)
    state = older_state(packed_before(old), prior, RULES.regression)
    assert (len(state.recent), state.settled.ratings, state.settled_at) == (window(dials), 1, 1)
    assert state.latest is not None
    assert (state.latest.ratings, len(state.pack()) <= MOST_BYTES) == (before, True)


@pytest.mark.parametrize("place", [1, 2, 129])  # the numbers of dials, of answers, and of the first one's signals
def test_a_state_of_the_version_before_whose_counts_are_wrong_is_corrupt(place: int) -> None:
    for value in range(256):
        changed = STATE[:place] + bytes([value]) + STATE[place + 1 : -4]
        if changed != STATE[:-4]:
            with pytest.raises(Corrupt):
                older_state(changed + zlib.crc32(changed).to_bytes(4, "little"), RULES.prior, RULES.regression)
    with pytest.raises(Corrupt):
        older_state(STATE[:-1], RULES.prior, RULES.regression)


@pytest.mark.parametrize("cut", [True, False])
async def test_what_people_set_survives_an_upgrade_where_the_log_was_cut(tmp_path: Path, cut: bool) -> None:
    assert RULES.older_hash == HASH != RULES.hash
    now = 1000.0
    turns = [steered_turn(f"t{k}:0", BOB, 10.0 + k) for k in range(60)]
    with SqlLog.open(tmp_path / "log", lambda: now, RecordConfig(segment_rows=50, retain_days=30.0)) as log:
        await log.append(SteeringBasis.of(BASIS, at=1.0), set_dials("1", ANN, 1.0, lists=0.25), *turns[:55])
        await log.append(*turns[55:])
        cache = cache_at(tmp_path)
        await (await folded(log, cache)).save()
        cursor, note = cache.begin(RULES.hash)
        cache.begin(RULES.older_hash)
        allowed = packed_before(replace(older_state(STATE, RULES.prior, RULES.regression), private=False))
        cache.write(cursor, note, {ANN: (cursor, None, STATE), BOB: (cursor, None, allowed)})
        if cut:
            now += 60 * 86_400.0
            assert await log.drop_old(now, log.newest()) > 0
        beside = await folded(log, PersonCacheView(tmp_path / "folds" / "people.sqlite", None, Encrypt.NONE))
        fold = await folded(log, cache)
        for each in (beside, fold):
            state = each.state(ANN)
            assert state is not None
            assert (state.held, state.strikes) == ((((1, 0.5),), 1) if cut else (((1, 0.25),), 0))
        if cut:
            assert [each.ratings for each in await fold.evidence("acme", 9)] == [9], "ann's are private"
            later = steered_turn("later:0", ANN, 2000.0)
            await log.append(later, about(later, "s"))
            await fold.catch_up()
            await fold.save()
            value = cache.load(ANN)
            assert value is not None
            kept = PersonState.unpack(value, RULES.regression)
            assert (kept.held, kept.strikes, len(kept.recent)) == (((1, 0.5),), 1, 4)
            assert (await folded(log, cache_at(tmp_path))).cursor == log.newest()
