"""A process that serves or trains imports nothing of transformers' that it has no use for, and whoever uses it has the real one."""

import importlib
import json
import subprocess
import sys

import pytest

from ostinato.model.lazy_imports import DEFERRED, DeferringFinder

UNUSED = (*DEFERRED, "torch._inductor", "sympy", "triton", "sklearn", "pandas", "torchvision")
STARTED = f"""
import json, sys
import ostinato.launch.workers.serve, ostinato.launch.workers.train
import ostinato.engine.embedded.engine, ostinato.model.load, ostinato.model.renderer, ostinato.train.trainer
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM
loaded = [name for name in {UNUSED!r} if name in sys.modules]
import torch
from transformers.distributed import expert_parallel, sharding_utils
from transformers.loss.loss_for_object_detection import linear_sum_assignment
rows, columns = linear_sum_assignment([[4, 1], [2, 0]])
plain = isinstance(torch.ones(1), sharding_utils.DTensor)
from torch.distributed.tensor import DTensor, Shard
real = DTensor is sharding_utils.DTensor._real(), isinstance(Shard(1), sharding_utils.Shard), sharding_utils.Shard(1) == Shard(1)
print(json.dumps([loaded, [*map(int, columns)], plain, real, torch._dynamo.__file__ is not None]))
"""


def test_gateway_and_trainer_import_none_of_it_and_users_of_it_have_the_real_one():
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], [1, 0], False, [True, True, True], True]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Imports the module `asks_here.code` of this text beside these packages, of which those without a dot are deferred."""
    made = []

    def plant(code, packages, deferred=None):
        for name, text in ({"asks_here.code": code, "asks_here": ""} | packages).items():
            place = tmp_path.joinpath(*name.split("."))
            is_package = any(other.startswith(f"{name}.") for other in ({"asks_here.code": code} | packages))
            path = place / "__init__.py" if is_package else place.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            made.append(name)
        finder = DeferringFinder("asks_here", deferred or [name for name in packages if "." not in name])
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        importlib.invalidate_caches()
        return importlib.import_module("asks_here.code")

    monkeypatch.syspath_prepend(tmp_path)
    yield plant
    for name in made:
        sys.modules.pop(name, None)


COSTLY = {
    "costly": "LEVEL = 3\nclass Kind: pass\ndef twice(x): return 2 * x\n",
    "costly.deep": "def thrice(x): return 3 * x\n",
}


def test_what_is_asked_for_is_imported_when_it_is_used(planted):
    code = planted(
        "import costly.deep\nfrom costly import Kind, twice\nfrom costly.deep import thrice\nmade = costly.deep.thrice\nkind = Kind()\n",
        COSTLY,
    )
    assert "costly" not in sys.modules
    assert "costly.deep" not in sys.modules
    assert [code.twice(2), code.thrice(2), code.made(1)] == [4, 6, 3]
    assert sys.modules["costly"].Kind is not code.Kind
    assert isinstance(sys.modules["costly"].Kind(), code.Kind)
    assert isinstance(code.kind, sys.modules["costly"].Kind)
    assert not isinstance(3, code.Kind)


def test_a_class_that_is_derived_from_one_has_the_real_base(planted):
    code = planted("from costly import Kind\nclass Own(Kind): pass\n", COSTLY)
    assert code.Own.__mro__[1] is sys.modules["costly"].Kind


def test_what_is_not_installed_or_is_imported_already_stays_so(planted):
    trying = "try:\n    import not_here_at_all\nexcept ImportError:\n    not_here_at_all = None\n"
    code = planted(f"{trying}import json\n", {}, deferred=["not_here_at_all", "json"])
    assert code.not_here_at_all is None
    assert code.json is json


def test_another_thread_has_the_real_one_meanwhile(planted):
    asked = "import threading, importlib\nfound = []\n"
    other = (
        "t = threading.Thread(target=lambda: found.append(importlib.import_module('costly')))\nt.start(); t.join()\n"
    )
    code = planted(asked + other, COSTLY)
    assert code.found == [sys.modules["costly"]]
    assert code.found[0].LEVEL == 3


def test_a_module_that_fails_leaves_no_stand_in(planted):
    with pytest.raises(ZeroDivisionError):
        planted("import costly\n1 / 0\n", COSTLY)
    assert importlib.import_module("costly").LEVEL == 3
