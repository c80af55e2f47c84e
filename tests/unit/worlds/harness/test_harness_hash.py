"""A harness's hash is the same in every process, and another as soon as the model would see anything else."""

import subprocess
import sys

import pytest

from ostinato.core.conversation import Tool
from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.catalog import NAMES, HarnessConfig, open_harness
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.repair import RepairConfig
from ostinato.worlds.harness.tools import ToolsConfig

PROGRAM = "from ostinato.worlds.harness.catalog import *\nfor name in NAMES: print(open_harness(name).hash)"


def test_every_process_makes_the_same():
    ours = [open_harness(name).hash for name in NAMES]
    for seed in "1", "2":
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ours


@pytest.mark.parametrize(
    "config",
    [
        *(
            HarnessConfig(tools=ToolsConfig(**{name: value}))
            for name, value in {"system": "Other.", "output_characters": 9000, "command_s": 61.0, "tokens": 1}.items()
        ),
        *(
            HarnessConfig(repair=RepairConfig(**{name: value}))
            for name, value in {
                "path": "a.py",
                "command": ("sh",),
                "command_s": 1.0,
                "failed": "{output}",
                "output_characters": 101,
            }.items()
        ),
    ],
)
def test_every_setting_is_in_it(config):
    changed = [name for name in NAMES if open_harness(name, config).hash != open_harness(name).hash]
    assert len(changed) == 1


def test_tools_are_in_it_with_their_order_and_keys_of_settings_without():
    one, other = Tool(name="a", parameters={"x": 1, "y": 2}), Tool(name="b")
    base = harness_hash("h", version=1, decides={"k": 1, "l": 2}, tools=(one, other))
    same = Tool(name="a", parameters={"y": 2, "x": 1})
    assert harness_hash("h", version=1, decides={"l": 2, "k": 1}, tools=(same, other)) == base
    others = {
        harness_hash("i", version=1, decides={"k": 1, "l": 2}, tools=(one, other)),
        harness_hash("h", version=2, decides={"k": 1, "l": 2}, tools=(one, other)),
        harness_hash("h", version=1, decides={"k": 1, "l": 3}, tools=(one, other)),
        harness_hash("h", version=1, decides={"k": 1, "l": 2}, tools=(other, one)),
        harness_hash("h", version=1, decides={"k": 1, "l": 2}, tools=(one, Tool(name="b", description="."))),
        harness_hash("h", version=1, decides={"k": 1, "l": 2}, tools=(one, Tool(name="b", strict=True))),
    }
    assert len(others | {base}) == 7


def test_what_is_unknown_is_refused():
    with pytest.raises(BadConfig, match="no harness 'fly'; there are single, tools"):
        open_harness("fly")
    with pytest.raises(BadConfig, match="JSON's types"):
        harness_hash("h", version=1, decides={"k": object()})
