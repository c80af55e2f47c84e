"""The accountant against dp-accounting's, the sensitivity of what is released, the noise, the year's budget, and gateways that keep it."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.adaptation.membership import membership
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.adapt.people import BASIS
from tests.unit.adapt.test_fitted_prior import CONFIG, CROWD, NEW, OTHERS, Gateway, log_with, priors, rated
from tests.unit.adapt.test_prior import DIALS, MEAN, people

from ostinato.adapt import dials
from ostinato.adapt.config import AdaptConfig, TenantAdaptConfig
from ostinato.adapt.learner import Evidence
from ostinato.adapt.prior import fit_prior, flat_prior
from ostinato.adapt.privacy import (
    GRID,
    YEAR_S,
    PrivacyBudget,
    composed_sigma,
    contribution,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_sigma,
    noised,
    prior_of,
    release_prior,
    secure_gauss,
    total_contribution,
    within_year,
)
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Consent, ConsentGiven, Person, SteeringBasis
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog

CLIP = 0.3
BUDGET = PrivacyBudget(epsilon=2.0, delta=1e-6, releases=4)

# (noise multipliers, delta, epsilon) by dp-accounting 0.6.0: PLDAccountant(value_discretization_interval=1e-4), GaussianDpEvent
REFERENCE = [
    ([0.5], 1e-5, 9.99726),
    ([1.0], 1e-5, 4.37718),
    ([2.0], 1e-5, 1.99309),
    ([4.0], 1e-5, 0.92634),
    ([1.0], 1e-7, 5.34935),
    ([8.0], 1e-6, 0.50386),
    ([20.0] * 100, 1e-5, 1.99309),
    ([13.3] * 52, 4e-5, 1.99548),
    ([5.0] * 12, 1e-6, 3.2332),
    ([30.0] * 365, 1e-8, 3.51752),
    ([3.0, 4.0, 6.0, 10.0], 1e-6, 2.05593),
]


@pytest.mark.parametrize(("sigmas", "delta", "epsilon"), REFERENCE)
def test_epsilon_is_that_of_dp_accounting(sigmas: list[float], delta: float, epsilon: float) -> None:
    assert gaussian_epsilon(composed_sigma(sigmas), delta) == pytest.approx(epsilon, rel=1e-4)


@given(epsilon=st.floats(1e-3, 200), log_delta=st.floats(-300, -0.01))
def test_sigma_is_the_inverse_of_epsilon_and_of_delta(epsilon: float, log_delta: float) -> None:
    delta = 10**log_delta
    sigma = gaussian_sigma(epsilon, delta)
    assert gaussian_delta(sigma, epsilon) <= delta  # never less noise than promised
    assert gaussian_epsilon(sigma, delta) == pytest.approx(epsilon, rel=1e-6)
    assert gaussian_delta(sigma * (1 - 1e-6), epsilon) > delta


@pytest.mark.parametrize(
    ("epsilon", "delta", "field"), [(0, 1e-5, "epsilon"), (math.nan, 1e-5, "epsilon"), (1, 0, "delta"), (1, 1, "delta")]
)
def test_an_impossible_budget_is_refused_by_its_field(epsilon: float, delta: float, field: str) -> None:
    with pytest.raises(BadConfig, match=f"adapt.privacy.{field}"):
        gaussian_sigma(epsilon, delta)


# ---------------------------------------------------------------- sensitivity

numbers = st.sampled_from([st.floats(-1000, 1000, width=32), st.floats(width=32)])  # moderate ones, and all there are


@given(told=numbers.flatmap(lambda each: st.lists(each, min_size=30, max_size=30)), clip=st.floats(1e-3, 10))
def test_nobody_moves_the_sum_by_more_than_its_sensitivity(told: list[float], clip: float) -> None:
    half_DD, shift_D = np.array(told[:25], np.float32).reshape(5, 5), np.array(told[25:], np.float32)
    with np.errstate(all="ignore"):
        vector = contribution(Evidence(half_DD @ half_DD.T, shift_D, ratings=10**6), clip)
    assert squared(vector) <= 2 * GRID**2


def test_a_person_with_huge_features_counts_as_one_at_the_clip() -> None:
    huge = Evidence.none(DIALS)
    huge = replace(huge, precision_DD=np.eye(5, dtype=np.float32), shift_D=np.full(5, 1e30, np.float32), ratings=1000)
    told = contribution(huge, CLIP)
    assert squared(told) <= 2 * GRID**2
    assert math.isqrt(squared(told[:DIALS])) == pytest.approx(GRID, rel=1e-5)  # it is clipped, not left out
    others = people(200, MEAN)
    before, after = (prior_of(total_contribution(group, DIALS, CLIP), CLIP)[0] for group in (others, [*others, huge]))
    moved = np.linalg.norm(after.mean_D - before.mean_D)
    assert 0 < moved < 2 * CLIP / 200


def test_who_has_rated_too_little_to_be_told_from_noise_contributes_nothing() -> None:
    few = people(1, MEAN, ratings=9)[0]
    assert not contribution(few, CLIP).any()
    assert contribution(people(1, MEAN, ratings=10)[0], CLIP).any()


def squared(vector: np.ndarray) -> int:
    return sum(int(number) ** 2 for number in vector)


# ---------------------------------------------------------------- release


def test_without_noise_the_release_is_near_what_em_fits() -> None:
    told = people(200, MEAN)
    prior, counted = prior_of(total_contribution(told, DIALS, CLIP), CLIP)
    em = fit_prior(told, flat_prior(DIALS))
    assert counted == 200
    np.testing.assert_allclose(prior.mean_D, em.mean_D, atol=0.01)
    ours, theirs = (np.diag(each.covariance_DD)[:DIALS] for each in (prior, em))
    np.testing.assert_allclose(ours, theirs, atol=1.5e-3)


def test_noise_has_the_deviation_that_the_accountant_was_told() -> None:
    """On the count, a quarter of the grid's unit, whose noise nothing clips."""
    total_P = total_contribution(people(3, MEAN), DIALS, CLIP) * 10_000
    gauss = random.Random(1).gauss
    counts = [prior_of(noised(total_P, 50.0, gauss), CLIP)[1] for _ in range(1000)]
    assert np.mean(counts) == pytest.approx(30_000, abs=100)
    assert np.std(counts) == pytest.approx(50 * math.sqrt(2) * 4, rel=0.1)


def test_a_prior_is_positive_definite_and_bounded_however_large_the_noise_is() -> None:
    total_P = total_contribution(people(3, MEAN), DIALS, CLIP)
    gauss = random.Random(2).gauss
    for _ in range(200):
        prior = prior_of(noised(total_P, 1000.0, gauss), CLIP)[0]  # `Prior` refuses other covariances
        assert np.linalg.norm(prior.mean_D[:DIALS]) <= CLIP * 1.001


def test_noise_is_the_operating_systems_and_no_seed_repeats_it() -> None:
    told, found = people(3, MEAN), list[bytes]()
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        found.append(release_prior(told, DIALS, clip=CLIP, sigma=2.0).prior.mean_D.tobytes())
    assert found[0] != found[1]


def test_an_organisation_counts_for_as_many_people_as_tell_as_much_without_noise() -> None:
    """By the variance of a dial's mean: the flat prior's over so many people, or over these and the noise's beside it."""
    told = people(25, MEAN, ratings=10) * 40
    sigma, width = 5.0, float(flat_prior(DIALS).covariance_DD[0, 0])
    expected = width / (width / 1000 + (sigma * math.sqrt(2) * CLIP / 1000) ** 2)
    found = [release_prior(told, DIALS, clip=CLIP, sigma=sigma).people for _ in range(5)]
    assert expected == pytest.approx(400, abs=1)
    assert np.median(found) == pytest.approx(expected, abs=120)
    assert release_prior(told, DIALS, clip=CLIP, sigma=0.0).people == 1000
    assert release_prior(told[:10], DIALS, clip=CLIP, sigma=50.0).people < 40


def test_the_order_of_people_changes_no_bit_of_the_sum() -> None:
    told = people(50, MEAN)
    assert total_contribution(told, DIALS, CLIP).tobytes() == total_contribution(told[::-1], DIALS, CLIP).tobytes()


def test_a_published_prior_tells_who_was_in_it_without_noise_and_hardly_with_it() -> None:
    pool_NP = np.stack([contribution(each, CLIP) for each in people(200, MEAN, ratings=10)])
    open_, planted_open = membership(pool_NP, 100, 0.0, trials=50)
    private, planted = membership(pool_NP, 100, gaussian_sigma(2.0, 1e-6), trials=50)
    assert open_ > 0.6
    assert planted_open > 0.75
    assert private < 0.58
    assert planted < 0.7


# ---------------------------------------------------------------- budget


def test_the_releases_of_a_year_spend_the_budget_exactly_and_one_more_is_refused() -> None:
    earlier, spent = list[float](), list[float]()
    for _ in range(4):
        earlier.append(BUDGET.next_sigma(earlier))
        spent.append(BUDGET.spent(earlier))
    assert earlier == [gaussian_sigma(2.0, 1e-6) * 2] * 4
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(2.0, rel=1e-6)
    with pytest.raises(Unavailable, match=r"adapt\.privacy\.epsilon = 2\.0"):
        BUDGET.next_sigma(earlier)
    assert BUDGET.next_sigma(earlier[1:]) == earlier[0]
    with pytest.raises(Unavailable):
        BUDGET.next_sigma([math.nan])


def test_priors_count_for_365_days_and_as_long_as_they_are_in_the_future() -> None:
    """A clock that went back gives no budget back."""
    told = [(0.0, 1.0), (10.0, 2.0), (9 * YEAR_S, 3.0)]
    assert within_year(told, YEAR_S - 0.1) == [1.0, 2.0, 3.0]
    assert within_year(told, YEAR_S) == [2.0, 3.0]
    assert BUDGET.words([*told, (20.0, 0.0)], 30.0).endswith(
        "by 3 of 4 releases; 1 more without noise, which no budget covers"
    )


def test_fewer_releases_have_less_noise_and_those_of_before_still_count() -> None:
    one = replace(BUDGET, releases=1)
    assert one.next_sigma([]) == pytest.approx(BUDGET.next_sigma([]) / 2)
    with pytest.raises(Unavailable):
        one.next_sigma([BUDGET.next_sigma([])])


def test_delta_must_be_below_one_in_the_number_of_people() -> None:
    with pytest.raises(BadConfig, match=r"adapt\.privacy\.delta = 0\.5 is not below 1 in 2"):
        replace(BUDGET, delta=0.5).admits({"acme": 2})
    assert replace(BUDGET, delta=0.49).admits({"acme": 2}) == ["acme"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"privacy": {"epsilon": 1e-9}}, r"adapt\.privacy\.epsilon = 1e-09 leaves nothing but noise"),
        (
            {"privacy": {"epsilon": 1.0}, "violations": {"signals": ["reported"]}},
            r"adapt\.privacy\.epsilon cannot be kept with adapt\.violations\.signals",
        ),
    ],
)
def test_settings_whose_promise_could_not_be_kept_are_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptConfig.model_validate(more)


# ---------------------------------------------------------------- gateways


MANY = [("acme", f"user {number}") for number in range(40)]  # so many that no noise of epsilon 100 leaves fewer than 20


def private(
    epsilon: float, *, releases: int = 1, delta: float = 1e-6, every_s: float = 60.0, **more: object
) -> AdaptConfig:
    privacy = {"epsilon": epsilon, "delta": delta, "releases": releases}
    given = {"mode": "dials", "users": "declared", "holdout": 0.0, "prior_people": 20, "prior_every_s": every_s}
    return AdaptConfig.model_validate({**given, "privacy": privacy, **more})


async def sums_that_are_noised(
    rows: Sequence[Person], directory: Path, config: AdaptConfig, monkeypatch: pytest.MonkeyPatch
) -> list[np.ndarray]:
    """The sums that a gateway adds noise to, tenant by tenant, for people who have rated."""
    found = list[np.ndarray]()

    def watched(total_P: np.ndarray, sigma: float) -> np.ndarray:
        assert sigma == gaussian_sigma(config.privacy.epsilon, config.privacy.delta) * math.sqrt(
            config.privacy.releases
        )
        found.append(total_P)
        return noised(total_P, sigma)

    monkeypatch.setattr("ostinato.adapt.privacy.noised", watched)
    assert await Gateway(await log_with(rated(rows, ratings=10)), directory, config).refit()
    return found


@pytest.mark.parametrize("level", ["shared", "own"])
async def test_a_person_moves_one_tenants_sum_by_its_sensitivity_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """All that a prior is made of are these sums, noised. Whoever is beyond the newest thousand counts, too."""
    monkeypatch.setattr(dials, "_MOST_FITTED", 5)
    config = private(2.0, releases=52, tenants={"bolt": TenantAdaptConfig(prior=level)})  # type: ignore[arg-type]
    whole = await sums_that_are_noised([*CROWD, *OTHERS], tmp_path / "all", config, monkeypatch)
    fewer = await sums_that_are_noised([*CROWD, *OTHERS[1:]], tmp_path / "fewer", config, monkeypatch)
    moved = [squared(one - other) for one, other in zip(whole, fewer, strict=True)]
    assert len(whole) == 2
    assert sorted(moved)[0] == 0
    assert 0 < sorted(moved)[1] <= 2 * GRID**2
    assert {int(total_P[-1]) for total_P in whole} == {24 * GRID // 4}


async def test_a_gateways_prior_is_what_people_said_with_little_noise_and_nothing_with_much(tmp_path: Path) -> None:
    for number, epsilon in enumerate((100.0, 0.01)):
        log = await log_with(rated(MANY, ratings=10))
        gateway = Gateway(log, tmp_path / str(number), private(epsilon))
        assert await gateway.refit()
        (row,) = priors(log)
        assert row.sigma == gaussian_sigma(epsilon, 1e-6)
        assert (row.people > 20, gateway.leans() != (0.0, 0.0, 0.0)) == (epsilon == 100.0,) * 2
        if row.people:
            assert gateway.leans()[0] > 0.3
            assert gateway.leans()[1] < -0.3


async def test_an_organisations_own_level_has_noise_too(tmp_path: Path) -> None:
    found = set[tuple[float, ...]]()
    for number in range(2):
        log = await log_with([*rated(CROWD, ratings=10), *rated(OTHERS, (-1.0, 0.0, 1.0), 10)])
        own = TenantAdaptConfig(prior="own")
        assert await Gateway(log, tmp_path / str(number), private(100.0, tenants={"bolt": own})).refit()
        found.add(priors(log)[0].organisations["bolt"])
    assert len(found) == 2, "of the same ratings"


async def test_releases_lie_so_far_apart_that_they_last_a_year(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD, ratings=10))
    gateway = Gateway(log, tmp_path, private(2.0, releases=4))
    for number in range(1, 7):  # a year and a half
        assert await gateway.refit()
        assert not await gateway.refit()
        gateway.now += YEAR_S / 4 - 1.0
        assert not await gateway.refit()
        gateway.now += 1.5
        assert [row.number for row in priors(log)] == [*range(1, number + 1)]
    rarer = Gateway(log, tmp_path / "rarer", private(2.0, releases=4, every_s=YEAR_S))
    rarer.now = gateway.now
    assert not await rarer.refit()


async def test_a_spent_budget_keeps_the_last_prior_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever spent it: it is read from the log by every gateway."""
    log = await log_with(rated(MANY, ratings=10))
    assert await Gateway(log, tmp_path / "one", private(100.0)).refit()
    hasty = Gateway(log, tmp_path / "two", private(100.0, releases=100))
    hasty.now += YEAR_S / 50
    for _ in range(3):
        assert not await hasty.refit()
    (told,) = [record.message for record in caplog.records]
    assert "1 releases of the prior have spent epsilon 100.000 of adapt.privacy.epsilon = 100.0" in told
    assert len(priors(log)) == 1
    assert hasty.leans(NEW)[0] > 0.3
    hasty.now = 1000.0 + YEAR_S
    assert await hasty.refit()
    assert hasty.dials.fold is not None
    assert (
        PrivacyBudget(epsilon=100.0, delta=1e-6, releases=100)
        .words(hasty.dials.fold.priors, hasty.now)
        .endswith("by 1 of 100 releases")
    )


async def test_dials_of_other_names_spend_the_same_budget(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD, ratings=10))
    assert await Gateway(log, tmp_path / "one", private(2.0)).refit()
    await log.append(SteeringBasis.of(replace(BASIS, names=("a", "b", "c")), at=500.0))
    for number in range(2):  # from the log, and from what was saved
        renamed = Gateway(log, tmp_path / "two", private(2.0))
        renamed.now += 10.0 + number
        assert not await renamed.refit()
        await renamed.dials.close()
    assert len(priors(log)) == 1


async def test_of_gateways_that_release_at_once_one_spends_though_their_dials_differ(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD, ratings=10))
    one, two = (Gateway(log, tmp_path / name, private(2.0)) for name in ("one", "two"))
    await one.dials.follow()
    await log.append(SteeringBasis.of(replace(BASIS, names=("a", "b", "c")), at=500.0))
    await two.dials.follow()
    await one.dials.refit()
    await two.dials.refit()
    assert len(priors(log)) == 1


async def test_retention_drops_no_prior_that_the_budget_counts(tmp_path: Path) -> None:
    now, config = 1000.0, private(2.0, releases=4)
    with SqlLog.open(tmp_path / "log", lambda: now, RecordConfig(segment_rows=50, retain_days=1.0)) as log:
        await log.append(SteeringBasis.of(BASIS, at=1.0), *rated(CROWD, ratings=10))
        one = Gateway(log, tmp_path / "one", config)
        assert await one.refit()
        await log.append(*rated(OTHERS))
        await log.append(*rated(OTHERS, ratings=6)[-2:])
        now += 300 * 86_400.0
        assert await log.drop_old(now, log.newest()) > 0
        assert await log.horizon() > 481
        two = Gateway(log, tmp_path / "two", private(2.0))
        two.now = now
        assert not await two.refit(), "a quarter of the year's budget is spent, and this one would take all"
        await two.dials.follow()
        assert two.dials.fold is not None
        assert two.dials.fold.prior_row is not None


async def test_a_prior_without_noise_is_not_used_once_noise_is_asked_for(tmp_path: Path) -> None:
    log = await log_with(rated(CROWD, ratings=10))
    bare = Gateway(log, tmp_path / "bare", CONFIG)
    assert await bare.refit()
    assert bare.leans()[0] > 0.3
    gateway = Gateway(log, tmp_path / "private", private(0.01))
    await gateway.dials.follow()
    assert gateway.leans() == (0.0, 0.0, 0.0)
    assert await gateway.refit(), "at once"
    assert [row.sigma > 0 for row in priors(log)] == [False, True]


async def test_a_tenant_whose_people_displace_each_other_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = [("bolt", user) for _, user in MANY[1:]]
    log = await log_with([*rated(MANY, ratings=10), *rated(others, (-1.0, 0.0, 1.0), 10)])
    gateway = Gateway(log, tmp_path, private(100.0, most_states=40))
    assert await gateway.refit()
    assert gateway.leans()[0] < -0.3, "as bolt's people say"
    assert "to the people of acme, who are 40, or were more: raise adapt.most_states" in caplog.text


async def test_a_tenant_whose_people_once_displaced_each_other_stays_out_until_all_are_folded_anew(
    tmp_path: Path,
) -> None:
    others = [("bolt", user) for _, user in MANY[1:]]
    log = await log_with([*rated(MANY, ratings=10), *rated(others, (-1.0, 0.0, 1.0), 10)])
    small = private(100.0, most_states=39)
    gateway = Gateway(log, tmp_path / "a", small)
    assert await gateway.refit()
    for tenant, user in MANY[:20]:  # with them gone, there is room
        await log.append(ConsentGiven(id=user, tenant=tenant, user=user, level=Consent.NEVER, at=9.0))
    await gateway.dials.follow()
    assert gateway.dials.fold is not None
    await gateway.dials.fold.save()
    cache = gateway.cache
    assert (cache.crowded("acme"), cache.crowded("other")) == (True, False)
    assert Gateway(log, tmp_path / "a", small).cache.crowded("acme"), "on disk"
    cache.begin("other rules")
    assert not cache.crowded("acme")


async def test_a_tenant_with_too_many_people_for_delta_blocks_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = [("bolt", user) for _, user in MANY[:30]]
    log = await log_with([*rated(MANY, ratings=10), *rated(others, (-1.0, 0.0, 1.0), 10)])
    gateway = Gateway(log, tmp_path, private(100.0, delta=1 / 64))
    assert await gateway.refit()
    assert gateway.leans()[0] < -0.3, "as bolt's people say"
    assert "No prior is fitted to the people of acme, too many for adapt.privacy.delta" in caplog.text


@given(people=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 3000)), log_delta=st.floats(-4, -1))
def test_those_who_are_admitted_are_fewer_than_delta_allows_and_nobody_loses_by_anothers_crowd(
    people: dict[str, int], log_delta: float
) -> None:
    budget = replace(BUDGET, delta=10**log_delta)
    try:
        admitted = budget.admits(people)
    except BadConfig:
        admitted = []
    assert budget.delta * sum(people[tenant] for tenant in admitted) < 1
    assert {tenant for tenant, number in people.items() if number * len(people) * budget.delta < 1} <= {*admitted}


async def test_the_first_prior_is_written_whether_anybody_has_rated_or_not(tmp_path: Path) -> None:
    log = await log_with([])
    assert await Gateway(log, tmp_path, private(2.0)).refit()
    assert priors(log)[0].people == 0


async def test_more_people_than_delta_is_for_release_nothing_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = await log_with(rated([*CROWD[:12], *OTHERS[:12]], ratings=10))
    gateway = Gateway(log, tmp_path, private(2.0, delta=1 / 24))
    for _ in range(3):
        assert not await gateway.refit()
    (told,) = [record.message for record in caplog.records]
    assert "adapt.privacy.delta = 0.041666666666666664 is not below 1 in 24" in told
    assert priors(log) == []


def test_the_noise_is_normal_and_reaches_as_far_out_as_the_smallest_delta_asks() -> None:
    assert secure_gauss(lambda bits: 0) > 14.8, "beyond 8.6, where uniform numbers of 53 bits end"
    bits = random.Random(3).getrandbits
    drawn = np.array([secure_gauss(bits) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(0.0, abs=0.03)
    assert drawn.std() == pytest.approx(1.0, abs=0.02)
    assert (np.abs(drawn) > 1.96).mean() == pytest.approx(0.05, abs=0.007)
