"""`ostinato doctor` says whose answers lean, and refuses settings under which nobody's can."""

import pytest

from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.doctor import CHECKS

look = dict(CHECKS)["dials"]
ON = "adapt.mode=dials"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "off: answers lean to nobody"),
        ([ON, "serve.user_keys=['a-secret-of-tests-1']"], "users that their tenant signs; run `ostinato adapt fit`"),
        ([ON, "adapt.users=declared"], "any user that a caller names; run `ostinato adapt fit`"),
    ],
)
def test_whose_answers_lean_is_told(given, said):
    assert look(load(None, given)).startswith(said)


def test_what_vllm_cannot_do_is_told():
    vllm = ["adapt.users=declared", "engine.kind=vllm", "engine.urls=['http://127.0.0.1:8000']"]
    assert look(load(None, [ON, *vllm])).endswith("none with tools, and ratings of them teach no dial")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "serve.user_keys is empty, so nobody has dials"),
    ],
)
def test_dials_that_nobody_can_have_are_refused_with_the_remedy(given, message):
    with pytest.raises(BadConfig, match=message):
        look(load(None, [ON, *given]))
