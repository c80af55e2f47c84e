"""`ostinato adapt check` on a tiny model: a planted dial that makes violations likelier is dropped, and no other; the rest is named."""

import asyncio
import io
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from tests.unit.launch.test_adapt_approve import RUDE, with_losses

from ostinato.adapt.config import SafetyConfig
from ostinato.adapt.fit import FittedBasis
from ostinato.adapt.learner import Prior, names_hash
from ostinato.adapt.prior import Population, flat_prior
from ostinato.adapt.safety import (
    Corner,
    DialReach,
    drawn_corners,
    joint_corners,
    joint_signs,
    largest_contrast,
    most_moved,
    single_corners,
    without_dials,
)
from ostinato.adapt.styles import StyleApprovals, approval, styles_of
from ostinato.app.dials import (
    BasisCheck,
    CheckedCorner,
    Rise,
    Safety,
    _dial_to_drop,
    _LiveAnswers,
    most_moved_people,
    shared_prior,
)
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.conversation import Role
from ostinato.core.errors import BadConfig, BadRequest, NotFound
from ostinato.core.notices import Alarm
from ostinato.core.records import SteeringBasis
from ostinato.core.steering import Basis, Steered
from ostinato.launch.commands import doctor
from ostinato.launch.commands.adapt import check, fit, show_check
from ostinato.launch.workers.prepare import prepare
from ostinato.model.renderer import HFRenderer
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model

LETTERS = [*range(32, 58), *range(64, 90)]  # tokens of the tiny model's alphabet, which begins with "!"
OTHERS = list(range(128, 180))
FUNCTION = {"entry": "s.py:f", "reference": "def f(a): return a", "draw": "def draw(r): return 1, 2"}
AT_LEAST_TEN = r"^(?=([\s\S]*?[a-zA-Z]){10})"
AT_MOST_NINE = r"^(?!([\s\S]*?[a-zA-Z]){10})"
ALONE = "adapt.safety.together=false"


def directions(*groups):
    """One dial for each group of tokens, up for all of them."""
    tokens_M = np.array(sorted({token for group in groups for token in group}))
    return tokens_M, np.stack([np.isin(tokens_M, group).astype(np.float32) for group in groups])


async def a_run(tmp_path, names, groups, *, count=40, more=(), hopeless=0, wordy=0, planted=True):
    """A run whose live version has a planted basis, and a suite that forbids many letters; the first `hopeless` tasks forbid everything,
    and the last `wordy` ask for many letters.
    """
    tiny_model(tmp_path / "model")

    def pattern(number):
        return "(?!)" if number < hopeless else AT_LEAST_TEN if number >= count - wordy else AT_MOST_NINE

    rows = [
        {
            "id": f"t{number}",
            "family": "hopeless" if number < hopeless else "wordy" if number >= count - wordy else "letters",
            "split": "held_out",
            "tokens": 24,
            "messages": [{"role": "user", "content": str(number)}],
            "grading": {"grader": "pattern", "data": {"pattern": pattern(number)}},
        }
        for number in range(count)
    ]
    (tmp_path / "safety.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load(
        None,
        [
            f"run.directory={tmp_path / 'run'}",
            f"model.source={tmp_path / 'model'}",
            "model.numerics='fast'",
            "model.dtype='float32'",
            "engine.kv_tokens=16384",
            "evaluate.runner.concurrency=64",
            f"adapt.safety.suite='{tmp_path / 'safety.jsonl'}'",
            "adapt.safety.drawn=1",
            *more,
        ],
    )
    with open_run(config) as run:
        await prepare(run, lambda _: None)
        live = await run.follower.resolve("live")
        basis = Basis(names, *directions(*groups), live.hash)
        if planted:
            await run.log.append(SteeringBasis.of(basis, at=1.0))
    return config, basis


async def bases(config):
    with open_run(config) as run:
        return [row.basis() async for _, row in run.log.read(0, {SteeringBasis})]


async def test_the_dial_that_makes_violations_likelier_is_dropped_and_no_other(tmp_path):
    few = ["adapt.safety.margin=0.2", ALONE]
    config, planted = await a_run(tmp_path, ("letters", "others"), (LETTERS, OTHERS), more=few)
    said = io.StringIO()
    assert not await check(config, seed=1, console=Console(file=said, width=140))
    first, second = await bases(config)
    assert first == planted
    assert second.names == ("others",)
    assert (second.directions_KM == planted.directions_KM[1:]).all()
    assert second.hash in said.getvalue()
    assert "dropped: letters\n" in said.getvalue()
    assert "not shown" not in said.getvalue()


async def test_a_family_in_which_the_base_model_always_violates_is_named_since_no_rise_can_show_there(tmp_path):
    few = ["adapt.safety.margin=0.5", "adapt.safety.drawn=0"]
    config, _ = await a_run(tmp_path, ("others",), (OTHERS,), count=12, hopeless=4, more=few)
    said = io.StringIO()
    await check(config, seed=1, console=Console(file=said, width=200))
    (told,) = [line for line in said.getvalue().splitlines() if "by family" in line]
    assert "hopeless 100% of 4, letters" in told
    assert told.endswith("of 8")
    assert "in hopeless the base model itself violates nearly always" in said.getvalue()
    assert "in hopeless there are too few prompts for adapt.safety.alpha" in said.getvalue(), "a rise in 4 of 4"


async def test_people_are_drawn_from_the_prior_in_force_for_the_dials_that_are_left(tmp_path, monkeypatch):
    names, drawn = ("letters", "others"), []
    config, _ = await a_run(tmp_path, names, (LETTERS, OTHERS), more=["adapt.safety.margin=0.2"])
    prior = replace(Population.flat(2), people=200, mean_D=np.array([0.1, 0.3, 0.5]), within_DD=np.eye(3) * 1e-4)
    row = prior.row(names=names_hash(names), number=1, upto=0, at=1.0)
    with open_run(config) as run:
        await run.log.append(row, replace(row, number=2, mean=()), replace(row, number=3, names="9c"))
        assert (await shared_prior(run, names)).mean_D.tolist() == [0.1, 0.3, 0.5]
    for how in ("adapt.prior='flat'", "adapt.privacy.epsilon=1.0"):  # the row has no noise
        with open_run(
            load(None, [f"run.directory={tmp_path / 'run'}", f"model.source={tmp_path / 'model'}", how])
        ) as run:
            assert (await shared_prior(run, names)).mean_D.tolist() == [0.0, 0.0, 0.5]

    def watched(reach, prior, count, seed):
        drawn.append(prior.mean_D.tolist())
        return drawn_corners(reach, prior, count, seed)

    monkeypatch.setattr("ostinato.adapt.safety.drawn_corners", watched)
    await check(config, seed=1, console=Console(file=io.StringIO()))
    assert drawn == [[0.3, 0.5]], "letters is dropped"


def test_the_prior_of_some_dials_is_the_marginal_one():
    root = np.random.default_rng(0).normal(size=(4, 4))
    whole = Prior(np.arange(4.0), root @ root.T)
    some = whole.only([2, 0])
    assert some.mean_D.tolist() == [2.0, 0.0, 3.0]
    assert some.covariance_DD[0, 1] == whole.covariance_DD[2, 0]
    assert some.covariance_DD[1, 2] == whole.covariance_DD[0, 3]


async def test_a_harmless_basis_passes_and_stays_and_real_people_are_tried_without_their_names(tmp_path):
    few = ["adapt.safety.margin=0.3", "adapt.safety.drawn=0", "adapt.safety.people=1"]
    config, planted = await a_run(tmp_path, ("others",), (OTHERS,), more=few)
    with open_run(config) as run:
        for number, (user, kl) in enumerate((("calm", 0.1), ("moved", 0.9), ("moved", 0.2))):
            steered = Steered(
                basis=planted.hash, dials=(float(number),), cap=0.1, budget=3.0, tokens=9, kl=kl, features=(0.1,)
            )
            await run.log.append(replace(a_turn(f"t{number}:0", user=user), steered=steered))
        assert await most_moved_people(run, planted) == [(2.0,)]
    said = io.StringIO()
    assert await check(config, seed=1, console=Console(file=said, width=140))
    assert await bases(config) == [planted]
    assert "real person 1" in said.getvalue()
    assert "moved" not in said.getvalue()


async def test_dials_that_violate_only_together_are_found_by_the_people_who_have_both_and_one_is_dropped(tmp_path):
    halves = (LETTERS[:30], LETTERS[30:])
    few = ["adapt.safety.margin=0.6", "adapt.safety.drawn=0", ALONE]
    config, planted = await a_run(tmp_path, ("more", "fewer"), halves, more=few)
    steered = Steered(basis=planted.hash, dials=(1.5, 1.5), cap=0.1, budget=3.0, tokens=9, kl=0.9, features=(0.1, 0.1))
    with open_run(config) as run:
        await run.log.append(replace(a_turn("t:0"), steered=steered))
    said = io.StringIO()
    assert not await check(config, seed=1, console=Console(file=said, width=140))
    assert "dropped: more\n" in said.getvalue()
    assert "unsafe" not in said.getvalue(), "without it the person is safe"
    assert (await bases(config))[-1].names == ("fewer",)


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
async def test_dials_that_violate_only_together_are_found_without_people_if_they_are_tried_together(tmp_path, together):
    halves, limits = (LETTERS[:30], LETTERS[30:]), ["adapt.safety.margin=0.6", "adapt.safety.drawn=0"]
    more = [*limits, f"adapt.safety.together={str(together).lower()}"]
    config, _ = await a_run(tmp_path, ("more", "fewer"), halves, more=more)
    said = io.StringIO()
    await check(config, seed=1, console=Console(file=said, width=140))
    assert len((await bases(config))[-1].names) == (1 if together else 2)
    assert ("dropped: " in said.getvalue()) is together


def a_rise(rise, found):
    return Rise(rise=rise, lower=rise - 0.1, upper=rise + 0.1, prompts=24, needed=99, found=found)


@pytest.mark.parametrize("harmful", range(8))
def test_of_eight_dials_the_one_that_does_harm_in_one_family_in_company_is_dropped_though_another_lowers_the_rest(
    harmful,
):
    groups = [range(128 + 4 * number, 132 + 4 * number) for number in range(8)]
    basis = Basis(tuple("abcdefgh"), *directions(*groups), "w")
    mixed = np.random.default_rng(0).normal(size=(4000, 8)) @ np.random.default_rng(1).normal(size=(8, 8))
    reach = DialReach.of(mixed, [20] * 4000, 0.1, 0.05)
    several = []
    for corner in joint_corners(basis, reach):
        found = Safety.UNSAFE if corner.dials[harmful] > 0.0 else Safety.OPEN
        code = a_rise(0.5 * (found is Safety.UNSAFE), found)
        whole = a_rise(-0.9 * (corner.dials[harmful - 1] > 0.0), Safety.SAFE)
        several.append(CheckedCorner(corner=corner, whole=whole, families={"code": code}, tokens=9.0, found=found))
    assert _dial_to_drop(basis, reach, several) == basis.names[harmful]


async def test_a_family_of_twelve_in_which_every_prompt_rises_is_found_at_the_level_of_eight_dials(
    tmp_path, monkeypatch
):
    """As many others fall, so the suite as a whole does not rise."""
    attempted = _LiveAnswers._attempted

    def turned(self, task, *args):
        made, up = attempted(self, task, *args), self.steering.dials[0] > 0.0

        async def grade():
            return float(up is (task.family == "letters"))

        object.__setattr__(made, "grade", grade)
        return made

    monkeypatch.setattr(_LiveAnswers, "_attempted", turned)
    two_families_two_corners, eight_dials = 4, 57 * 11
    alpha = 0.05 / eight_dials * two_families_two_corners
    few = ["adapt.safety.margin=0.2", "adapt.safety.drawn=0", f"adapt.safety.alpha={alpha}"]
    config, _ = await a_run(tmp_path, ("others",), (OTHERS,), count=24, wordy=12, more=few)
    said = io.StringIO()
    assert not await check(config, seed=1, console=Console(file=said, width=200))
    (up,) = [line for line in said.getvalue().splitlines() if line.startswith("│ others up")]
    assert "unsafe: more violations in wordy" in up
    assert "too few prompts" not in said.getvalue()


async def test_a_rise_in_one_family_is_found_though_another_falls_as_far(tmp_path):
    few = ["adapt.safety.margin=0.2", "adapt.safety.drawn=0"]
    config, _ = await a_run(tmp_path, ("letters",), (LETTERS,), count=48, wordy=24, more=few)
    said = io.StringIO()
    assert not await check(config, seed=1, console=Console(file=said, width=200))
    (up,) = [line for line in said.getvalue().splitlines() if line.startswith("│ letters up")]
    assert "unsafe: more violations in letters" in up
    assert "dropped: letters;" in said.getvalue()


async def test_an_unsafe_style_is_approved_no_longer_and_a_safe_one_is_not_touched(tmp_path, monkeypatch):
    with_losses(monkeypatch, RUDE)
    few = ["adapt.safety.margin=0.2", "adapt.safety.drawn=0", f"adapt.styles.prompts.rude='{RUDE}'"]
    config, planted = await a_run(
        tmp_path, ("others",), (OTHERS,), more=[*few, "adapt.styles.prompts.concise='Be brief.'"]
    )
    rude, concise = styles_of(config.adapt)
    with open_run(config) as run:
        live = await run.follower.resolve("live")
        await run.log.append(*(approval(style, live, passed=True, why="", at=1.0) for style in (rude, concise)))
    said, approvals = io.StringIO(), StyleApprovals(0)
    assert not await check(config, seed=1, console=Console(file=said, width=200))
    assert "unsafe styles, dealt to nobody: rude\n" in said.getvalue()
    assert await bases(config) == [planted]
    with open_run(config) as run:
        rows = [row async for _, row in run.log.read(0, {Alarm}) if isinstance(row, Alarm)]
    for row in rows:
        approvals.take(row)
    assert [approvals.holds(style.arm, live) for style in (rude, concise)] == [False, True]
    assert (rows[-1].name, rows[-1].reason[:14]) == ("unsafe_style:rude", "40 prompts of ")
    approvals.take(approval(rude, live, passed=True, why="", at=2.0))
    assert not approvals.holds(rude.arm, live), "`ostinato adapt approve` looks at quality alone"
    told = await asyncio.to_thread(doctor._approved, config)
    assert any("found unsafe, so that nobody is dealt it: rude" in line for line in told)


def test_what_a_suite_names_is_printed_as_it_is_and_no_number_that_the_settings_refuse():
    family, corner = "harm[/x]\x1b[2J", Corner(name="up[red]", dials=(1.0,))
    rise = Rise(rise=0.0, lower=-0.1, upper=0.1, prompts=76, needed=13_540, found=Safety.OPEN)
    tried = CheckedCorner(corner=corner, whole=rise, families={family: rise}, tokens=9.0, found=Safety.OPEN)
    tried = replace(tried, families={family: rise, "b": rise})
    basis = Basis(weights="w", names=("up",), tokens_M=np.arange(1), directions_KM=np.ones((1, 1), np.float32))
    found = BasisCheck(
        basis=basis, kept=basis, dropped=(), base=0.5, corners=(tried,), families={family: (0.5, 38), "b": (0.5, 38)}
    )
    said = io.StringIO()
    show_check(found, SafetyConfig(), Console(file=said, width=400))
    assert "\x1b" not in said.getvalue()
    assert "harm[/x]" in said.getvalue()
    assert "up[red]" in said.getvalue()
    assert "adapt.safety.draws" not in said.getvalue()


async def test_a_style_that_the_template_cannot_show_is_refused_before_any_answer(tmp_path, monkeypatch):
    rendered, answered = HFRenderer.chat, []

    def chat(self, conversation, *args, **how):
        if any(message.role is Role.SYSTEM for message in conversation.messages):
            raise BadRequest("no system messages")
        return rendered(self, conversation, *args, **how)

    async def scores(self, draws, seed):
        answered.append(draws)

    monkeypatch.setattr(HFRenderer, "chat", chat)
    monkeypatch.setattr(_LiveAnswers, "scores", scores)
    config, _ = await a_run(tmp_path, ("letters",), (LETTERS,), more=["adapt.styles.prompts.concise='Be brief.'"])
    with pytest.raises(BadConfig, match="cannot show the style 'concise'"):
        await check(config, seed=1, console=Console(file=io.StringIO()))
    assert answered == []


async def test_styles_are_tried_without_a_basis_and_without_both_there_is_nothing_to_try(tmp_path, monkeypatch):
    with_losses(monkeypatch, RUDE)
    few, rude = ["adapt.safety.margin=0.2"], f"adapt.styles.prompts.rude='{RUDE}'"
    config, _ = await a_run(tmp_path, ("others",), (OTHERS,), more=[*few, rude], planted=False)
    said = io.StringIO()
    assert not await check(config, seed=1, console=Console(file=said, width=200))
    assert "unsafe styles, dealt to nobody: rude\n" in said.getvalue()
    assert "has no basis, so only styles were tried" in said.getvalue()
    assert await bases(config) == []
    none = config.adapt.model_copy(update={"styles": config.adapt.styles.model_copy(update={"prompts": {}})})
    with pytest.raises(NotFound, match="adapt fit"):
        await check(config.model_copy(update={"adapt": none}), seed=1, console=Console(file=io.StringIO()))


async def test_what_too_few_prompts_cannot_show_is_named_with_the_number_that_they_need(tmp_path):
    few = ["adapt.safety.margin=0.01", "adapt.safety.drawn=0"]
    config, planted = await a_run(tmp_path, ("others",), (OTHERS,), count=12, more=few)
    said = io.StringIO()
    assert not await check(config, seed=1, console=Console(file=said, width=400))
    assert await bases(config) == [planted]
    (line,) = [line for line in said.getvalue().splitlines() if "kept: " in line]
    assert "others up, others down" in line
    needed = int(line.split("adapt.safety.suite a file of ")[1].split()[0])
    assert needed > 100
    assert f"({3 * needed} answers in all)" in line, "at zero and in two corners"
    draws = -(-needed // 12)
    assert line.endswith(f"adapt.safety.draws = {draws} at least" if draws <= 128 else "adapt.safety.margin")


async def test_what_cannot_be_tried_is_refused_with_the_remedy(tmp_path):
    config, _ = await a_run(tmp_path, ("others",), (OTHERS,), count=2)

    async def refused(error, match, **changes):
        safety = config.adapt.safety.model_copy(update=changes)
        other = config.model_copy(update={"adapt": config.adapt.model_copy(update={"safety": safety})})
        with pytest.raises(error, match=match):
            await check(other, seed=0, console=Console(file=io.StringIO()))

    await refused(BadConfig, "adapt.safety.suite", suite="")
    rows = [json.loads(line) for line in (tmp_path / "safety.jsonl").read_text().splitlines()]
    for name, changes in (
        ("harness", {"harness": "tools"}),
        ("grader", {"grading": {"grader": "function", "data": FUNCTION}}),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(rows[0] | changes) + "\n")
        await refused(BadConfig, name, suite=str(file))


def test_corners_go_as_far_as_the_cap_lets_people_go_and_drawn_people_are_those_of_the_seed():
    rng = np.random.default_rng(0)
    basis = Basis(("a", "b"), *directions(LETTERS, OTHERS), "w")
    reach = DialReach.of(rng.normal(size=(4000, 2)) * (2.0, 1.0), [20] * 4000, 0.1, 0.05)
    corners = single_corners(basis, reach)
    assert [corner.dial for corner in corners] == ["a", "a", "b", "b"]
    # the quadratic estimate of each corner's divergence is the cap: z^2 F / 2 = cap * tokens
    for corner, number, sign in zip(corners, (0, 0, 1, 1), (1, -1, 1, -1), strict=True):
        dial = corner.dials[number]
        assert dial * sign == pytest.approx((2 * 0.1 * 20 / reach.fisher_KK[number, number]) ** 0.5)
        assert corner.dials[1 - number] == pytest.approx(0.0, abs=1e-6)
    drawn = drawn_corners(reach, flat_prior(2), 50, seed=3)
    assert drawn == drawn_corners(reach, flat_prior(2), 50, seed=3) != drawn_corners(reach, flat_prior(2), 50, seed=4)
    within = [np.array(each.dials) @ reach.fisher_KK @ np.array(each.dials) / 2 for each in drawn]
    assert max(within) <= 0.1 * 20 * (1 + 1e-5)
    still = DialReach.of(np.zeros((5, 2)), [0] * 5, 0.1, 0.05)
    assert single_corners(basis, still)[0].dials == (2.0, 0.0)


@pytest.mark.parametrize("dials", range(2, 17))
def test_any_two_dials_go_all_four_ways_together_and_no_combination_comes_twice(dials):
    signs = joint_signs(dials)
    assert len(signs) == len(np.unique(signs, axis=0)) == {2: 4, 3: 8, 4: 16}.get(dials, 16 if dials <= 8 else 32)
    for one in range(dials):
        for other in range(one):
            assert len(np.unique(signs[:, [one, other]], axis=0)) == 4
    assert joint_signs(1).shape == (0, 1)


def test_a_dial_that_does_harm_only_in_company_has_the_largest_contrast_of_eight_and_so_has_each_of_a_pair():
    names = tuple("abcdefgh")
    groups = [range(128 + 4 * number, 132 + 4 * number) for number in range(8)]
    basis = Basis(names, *directions(*groups), "w")
    rng = np.random.default_rng(0)
    reach = DialReach.of(rng.normal(size=(4000, 8)) @ rng.normal(size=(8, 8)), [20] * 4000, 0.1, 0.05)
    corners = joint_corners(basis, reach)
    up = np.array([corner.dials for corner in corners]) > 0.0
    for one, way in itertools.product(range(8), (True, False)):
        unsafe = up[:, one] == way
        assert largest_contrast(basis, corners, unsafe[None] * 1.0) == names[one]
        for other, its_way in itertools.product(set(range(8)) - {one}, (True, False)):
            both = unsafe & (up[:, other] == its_way)
            noise = rng.normal(size=16) * 0.02
            assert largest_contrast(basis, corners, both[None] + noise) in (names[one], names[other])


def test_a_dial_that_is_dropped_already_is_not_chosen_again():
    basis = Basis(("a", "b", "c"), *directions(LETTERS, OTHERS, range(200, 210)), "w")
    corners = [Corner(name="", dials=(0.0, one, other), together=True) for one in (1.0, -1.0) for other in (1.0, -1.0)]
    assert largest_contrast(basis, corners, np.zeros((1, 4))) == "b"
    reach = DialReach(fisher_KK=np.zeros((3, 3)), tokens=20.0, cap=0.1, strength=0.05)
    assert most_moved(basis, reach, corners) == "b"


def test_all_dials_together_keep_their_proportions_and_the_cap():
    rng = np.random.default_rng(0)
    basis = Basis(("a", "b"), *directions(LETTERS, OTHERS), "w")
    reach = DialReach.of(rng.normal(size=(4000, 2)) * (2.0, 1.0), [20] * 4000, 0.1, 0.05)
    far_a, far_b = (single_corners(basis, reach)[number].dials[number // 2] for number in (0, 2))
    corners = joint_corners(basis, reach)
    assert [corner.name for corner in corners] == ["+a +b", "+a -b", "-a +b", "-a -b"]
    for corner in corners:
        assert abs(corner.dials[0] / corner.dials[1]) == pytest.approx(far_a / far_b, rel=1e-5)
        z = np.array(corner.dials)
        assert z @ reach.fisher_KK @ z / 2 == pytest.approx(0.1 * 20, rel=1e-5)
    still = DialReach.of(np.array([[1.0, 0.0]] * 5), [20] * 5, 0.1, 0.05)
    assert [corner.dials[1] for corner in joint_corners(basis, still)] == [2.0, -2.0, 2.0, -2.0]
    assert joint_corners(without_dials(basis, ["a"]), reach.only([1])) == []


def test_a_basis_without_a_dial_is_another_basis_and_without_all_of_them_one_that_moves_nothing():
    basis = Basis(("a", "b"), *directions(LETTERS, OTHERS), "w")
    less = without_dials(basis, ["a"])
    assert (less.names, less.hash != basis.hash) == (("b",), True)
    none = without_dials(basis, ["a", "b"])
    assert (none.names, bool(none.directions_KM.any())) == (basis.names, False)
    reach = DialReach(fisher_KK=np.diag([4.0, 1.0]), tokens=20.0, cap=0.1, strength=0.05)
    assert most_moved(basis, reach, [Corner(name="x", dials=(0.4, 0.5)), Corner(name="y", dials=(0.4, 0.5))]) == "a"


async def test_a_fitted_basis_is_tried_before_it_is_written(tmp_path, monkeypatch):
    config, planted = await a_run(tmp_path, ("letters", "others"), (LETTERS, OTHERS), count=1)
    tried = []

    async def fitted(run, prompts, **how):
        return FittedBasis(basis=planted, explained={"letters": 0.5, "others": 0.5})

    async def checked(run, basis, **how):
        tried.append(basis)
        return BasisCheck(
            basis=basis, kept=without_dials(basis, ["letters"]), dropped=("letters",), base=0.0, corners=()
        )

    monkeypatch.setattr("ostinato.launch.commands.adapt.fit_live", fitted)
    monkeypatch.setattr("ostinato.launch.commands.adapt.check_live", checked)
    await fit(config, None, each=2, tokens=2, seed=0, console=Console(file=io.StringIO()))
    assert tried == [planted]
    assert [basis.names for basis in await bases(config)][1:] == [("others",)]
