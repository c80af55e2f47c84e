"""What is optional and not installed is named with the extra that brings it, in one line."""

import sys

import pytest

from ostinato.core.errors import BadConfig
from ostinato.corpus.filters import CopyFinder
from ostinato.launch.commands.worlds import tasksets
from ostinato.launch.placing import ray_cluster
from ostinato.worlds.sandbox.e2b.account import Account


@pytest.mark.parametrize(
    ("module", "use", "extra"),
    [
        ("libcst", tasksets._check_installed, "worlds"),
        ("datasketch", lambda: CopyFinder(0.8), "corpus"),
        ("e2b", lambda: Account("base", {"E2B_API_KEY": "k"}), "e2b"),
        ("ray", ray_cluster._ray, "ray"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(monkeypatch, module, use, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadConfig) as refused:
        use()
    text = str(refused.value)
    assert f"pip install 'ostinato[{extra}]'" in text
    assert "\n" not in text
