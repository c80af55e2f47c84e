"""The short form of `make machines`: several hostile environments at once, with the tiny model."""

from dataclasses import replace

from rich.console import Console
from tests.examinations.machines.environments import CONTAINER, ENVIRONMENTS, Environment
from tests.examinations.machines.run import FAILED, tried

QUICK = (
    "model.numerics=fast",
    "model.kernels=torch",  # nothing is compiled for the new home
    "supervise.silence_s=300",  # what a busy machine delays is no fault of a worker's
)
BY_NAME = {each.name: each for each in ENVIRONMENTS}


def test_up_serves_and_learns_where_nearly_everything_is_missing(tmp_path):
    """No namespaces, home, proxies, programs or UTF-8; a path with a space and an umlaut; and Ctrl-C leaves nothing behind."""
    worst = Environment(
        name="worst",
        about="a container without home and programs",
        prefix=lambda _: CONTAINER,
        variables={
            **BY_NAME["turkish"].variables,
            **BY_NAME["dead-proxies"].variables,
            **BY_NAME["closed-home"].variables,
            "PATH": "bin",
        },
        settings=QUICK,
        prepare=BY_NAME["no-programs"].prepare,
        says={"up": "/proc/.cache/ostinato cannot be written: .* go to"},
        folder="a plaçe with ü",
        checks=("up",),
    )
    (outcome,) = tried(worst, tmp_path, Console())
    assert outcome.result != FAILED, outcome.line


def test_the_copilot_is_refused_in_a_container_and_its_remedy_named(tmp_path):
    refused = replace(
        BY_NAME["container"],
        checks=("demo",),
        refused=("demo",),
        says={"demo": "To allow it: .* Without it: --scenario tab"},
        demo=("--scenario", "copilot"),
    )
    (outcome,) = tried(refused, tmp_path, Console())
    assert outcome.result != FAILED, outcome.line


def test_an_environment_that_cannot_be_imitated_is_named(tmp_path):
    (outcome,) = tried(Environment(name="other", about="", missing=lambda: "no such processor"), tmp_path, Console())
    assert (outcome.result, outcome.line) == ("not tried", "no such processor")


def test_what_is_not_refused_as_it_should_be_is_a_failure(tmp_path):
    wrong = replace(BY_NAME["plain"], settings=("model.no_such_key=1",), checks=("doctor",))
    (outcome,) = tried(wrong, tmp_path, Console())
    assert outcome.result == FAILED
    assert "no_such_key" in outcome.line


def test_every_environment_has_a_name_of_its_own():
    assert len(BY_NAME) == len(ENVIRONMENTS)
