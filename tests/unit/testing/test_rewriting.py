"""A worker rewrites its share of the tests' assertions: the import finds them, and together the shares are all."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.assertion import rewrite
from tests import rewriting


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    files = [tmp_path / "room" / f"test_module_{number}_of_rewriting.py" for number in range(7)]
    files[0].parent.mkdir()
    for number, file in enumerate(files):
        file.write_text(f"def test_it():\n    found = {number}\n    assert found == -1\n")
    (tmp_path / "room" / "helper.py").write_text("assert True\n")
    return files


def worker(config, number, *arguments):
    """The configuration of worker `number` of three."""
    given = {"workerid": f"gw{number}", "workercount": 3}
    return SimpleNamespace(workerinput=given, args=list(map(str, arguments)), getini=config.getini, stash=config.stash)


def kept(file):
    return rewrite._read_pyc(file, rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}")


def test_each_module_is_one_workers_and_the_import_rewrites_none(modules, pytestconfig, monkeypatch):
    made = []
    monkeypatch.setattr(
        rewrite,
        "_rewrite_test",
        lambda file, config, whole=rewrite._rewrite_test: made.append(file) or whole(file, config),
    )
    for number in range(3):
        rewriting.rewrite_share(worker(pytestconfig, number, modules[0].parent))
    assert sorted(made) == modules
    monkeypatch.syspath_prepend(str(modules[0].parent))
    for number, file in enumerate(modules):
        with pytest.raises(AssertionError, match=rf"assert {number} == -1"):  # as a rewritten assertion says it
            __import__(file.stem).test_it()
        sys.modules.pop(file.stem)
    assert len(made) == 7


def test_a_share_is_a_third_of_them(modules, pytestconfig):
    rewriting.rewrite_share(worker(pytestconfig, 1, modules[0].parent))
    assert [file for file in modules if kept(file)] == modules[1::3]


def test_what_changed_is_rewritten_again_and_an_error_is_left_to_the_import(modules, pytestconfig):
    first, second, *_ = modules
    alone = worker(pytestconfig, 0, f"{first}::test_it", second.parent / "missing")
    rewriting.rewrite_share(alone)
    before = kept(first)
    first.write_text("def test_other_and_longer():\n    assert False\n")
    assert kept(first) is None
    rewriting.rewrite_share(alone)
    assert kept(first).co_names != before.co_names
    second.write_text("def (:\n")
    rewriting.rewrite_share(worker(pytestconfig, 0, second))
    assert kept(second) is None


def test_who_keeps_no_bytecode_or_is_no_worker_rewrites_nothing(modules, pytestconfig, monkeypatch):
    rewriting.rewrite_share(SimpleNamespace(args=[str(modules[0])]))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    rewriting.rewrite_share(worker(pytestconfig, 0, *modules))
    assert not any(map(kept, modules))


def test_the_modules_are_those_that_pytest_would_collect(modules):
    assert rewriting.named([str(modules[0].parent.parent)], ["test_*.py", "*_test.py"]) == modules
    assert rewriting.named([f"{modules[3]}::test_it[a::b]"], ["test_*.py"]) == [modules[3]]
    assert rewriting.named([str(Path("nowhere"))], ["test_*.py"]) == []
