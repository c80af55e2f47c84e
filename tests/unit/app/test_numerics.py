"""Contracts from configuration to log to screen."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from ostinato.app import numerics
from ostinato.app.learning import open_desk
from ostinato.app.numerics import engine_contract, stamp, trainer_contract, training
from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.numerics import Contract, differences
from ostinato.engine.embedded.form import prepack
from ostinato.launch.commands import doctor
from ostinato.launch.commands.checks import check_start
from ostinato.launch.commands.log import print_log
from ostinato.launch.commands.status import show_status
from ostinato.launch.views.contracts import apart, parts
from ostinato.model import selftest
from ostinato.model.selftest import ExactnessVerdict, Finding
from ostinato.testing.engine import CONTRACT
from ostinato.testing.tiny import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return f"model.source={tiny_model(tmp_path_factory.mktemp('numerics') / 'tiny', layers=1)}"


@pytest.fixture
def verdicts(monkeypatch):
    """What the self-test shall say, by dtype; and which it was asked."""
    said, asked = {}, []

    def examined(path, dtype, threads):
        asked.append((path.name, dtype, threads))
        return said.get(dtype, ExactnessVerdict(exact=True, threads=1, rows=2, reason="", seconds=0.1, table=()))

    monkeypatch.setattr(numerics, "_examined", examined)
    return said, asked


@pytest.mark.parametrize(("instructions", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_engine_and_trainer_agree_by_default_on_any_cpu(source, verdicts, monkeypatch, instructions, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": instructions})
    config = load(None, [source])
    assert engine_contract(config) == trainer_contract(config)
    assert (engine_contract(config).mode, engine_contract(config).dtype) == ("exact", dtype)
    assert training(config).compute == {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    assert training(config).publish == "bf16"


def test_engine_and_trainer_share_a_contract_unless_set_apart(source, verdicts):
    for compute in ("bf16", "fp32"):
        config = load(None, [source, f"model.compute={compute}"])
        assert engine_contract(config) == trainer_contract(config)
        assert training(config).compute == compute
    other = load(None, [source, "model.compute=bf16", "train.compute=fp32", "train.threads=2", "engine.block=64"])
    assert differences(engine_contract(other), trainer_contract(other)) == ("dtype",)


def test_threads_are_part_of_the_contract_only_where_they_change_bits(source, monkeypatch):
    def examined(path, dtype, threads):
        alike = len(threads) == 1
        return ExactnessVerdict(
            exact=alike, threads=threads[0], rows=2, reason="" if alike else "no", seconds=0.1, table=()
        )

    config = load(None, [source, "model.compute=bf16", "train.threads=2"])
    monkeypatch.setattr(numerics, "_examined", lambda *_: examined("", torch.bfloat16, (1,)))
    assert engine_contract(config) == trainer_contract(config)
    monkeypatch.setattr(numerics, "_examined", examined)
    assert "threads" in differences(engine_contract(config), trainer_contract(config))


def test_the_library_is_part_of_the_contract_only_where_it_computes(source, verdicts):
    said, asked = verdicts
    said[torch.float32] = ExactnessVerdict(
        exact=True, threads=1, rows=1, reason="", seconds=0.1, table=(), library=("gelu",)
    )
    config = load(None, [source, "model.compute=bf16", "train.compute=fp32", "train.threads=2"])
    assert (engine_contract(config).torch, engine_contract(config).isa) == ("", "")
    assert trainer_contract(config).torch == torch.__version__.partition("+")[0]
    assert asked[:2] == [("tiny", torch.bfloat16, (1, 2))] * 2
    assert asked[-1] == ("tiny", torch.float32, (1, 2))


def test_exact_mode_is_refused_where_it_cannot_hold_and_fast_mode_never_asks(source, verdicts):
    said, asked = verdicts
    said[torch.bfloat16] = ExactnessVerdict(
        exact=False, threads=1, rows=1, reason="no; set it to fast", seconds=0.1, table=()
    )
    with pytest.raises(BadConfig, match="no; set it to fast"):
        engine_contract(load(None, [source, "model.compute=bf16"]))
    asked.clear()
    fast = engine_contract(load(None, [source, "model.numerics=fast"]))
    assert (fast.mode, fast.rows, asked) == ("fast", 1, [])


INT8 = ["engine.products=int8", "model.numerics=fast"]


def test_whole_numbers_are_a_contract_of_their_own(source):
    config = load(None, [source, *INT8])
    assert differences(engine_contract(config), trainer_contract(config)) == ("quantisation",)
    found = numerics.integers(config)
    assert engine_contract(config).quantisation == found.name
    assert str(2 * found.most + 1) in found.name
    assert numerics.integers(load(None, [source])) is None


def test_whole_numbers_are_refused_where_their_turns_could_not_be_what_was_promised(source):
    with pytest.raises(BadConfig, match=r"engine\.products = 'int8' .* set model\.numerics = 'fast'"):
        engine_contract(load(None, [source, "engine.products=int8"]))
    with pytest.raises(BadConfig, match=r"train\.foreign_numerics = 'refuse' .* set it to 'label'"):
        engine_contract(load(None, [source, *INT8, "train.foreign_numerics=refuse"]))
    for where in (["model.kernels=torch"], ["model.device=auto"]):
        with pytest.raises(BadConfig, match=r"set model\.kernels = 'own' and model\.device = 'cpu'"):
            engine_contract(load(None, [source, *INT8, *where]))
    with pytest.raises(BadConfig, match=r"engine\.products = 'int8' is the embedded engine's"):
        load(None, [*INT8, "engine.kind=vllm", 'engine.urls=["http://one:1"]'])


FP8 = ["engine.products=fp8", "model.numerics=fast", "model.kernels=torch"]


def test_eight_bit_floats_are_a_contract_of_their_own_and_for_torchs_kernels_only(source):
    config = load(None, [source, *FP8])
    assert differences(engine_contract(config), trainer_contract(config)) == ("quantisation",)
    assert "fp8" in engine_contract(config).quantisation
    for where in (["model.kernels=own"], ["model.kernels=auto"]):
        with pytest.raises(BadConfig, match=r"engine\.products = 'fp8' .* set model\.kernels = 'torch'"):
            engine_contract(load(None, [source, *FP8, *where]))
    with pytest.raises(BadConfig, match=r"engine\.products = 'fp8' .* set model\.numerics = 'fast'"):
        engine_contract(load(None, [source, *FP8, "model.numerics=exact"]))


async def test_up_refuses_them_before_anything_is_started(tmp_path, source):
    config = load(None, [source, "engine.products=int8", f"run.directory={tmp_path / 'run'}", "evaluate.suite="])
    with pytest.raises(BadConfig, match=r"set model\.numerics = 'fast'"):
        await check_start(config)


def test_the_doctor_says_where_whole_numbers_are_slower(source, verdicts, monkeypatch):
    config = load(None, [source, *INT8, "model.compute=fp32"])
    monkeypatch.setattr(numerics, "pace", lambda _: {1: 0.5, 128: 2.0})
    assert doctor._numerics(config).endswith("slower here than plain products: 0.5x at 1 rows")
    monkeypatch.setattr(numerics, "pace", lambda _: {1: 1.5, 128: 2.0})
    assert doctor._numerics(config).endswith("one thread: 1.5x at 1 rows, 2.0x at 128 rows")


def test_the_machine_is_measured_once_per_process(source, monkeypatch):
    calls = []

    def examine(path, dtype, threads, prepack):
        calls.append((dtype, prepack))
        return ExactnessVerdict(exact=True, threads=1, rows=4, reason="", seconds=0.1, table=())

    monkeypatch.setattr(selftest, "examine", examine)
    config = load(None, [source, "model.compute=bf16"])
    numerics._examined.cache_clear()
    assert engine_contract(config) == trainer_contract(config)
    numerics._examined.cache_clear()
    assert calls == [(torch.bfloat16, prepack)]


def test_the_doctor_shows_what_was_tested(source, verdicts):
    said, _ = verdicts
    table = (Finding(what="linear 1 -> 2", rows=4), Finding(what="end to end", rows=8))
    said[torch.bfloat16] = ExactnessVerdict(exact=True, threads=1, rows=8, reason="", seconds=1.25, table=table)
    text = doctor._numerics(load(None, [source, "model.compute=bf16"]))
    assert "self-test, 1.2 s, 1 threads: exact mode holds with row rule 8" in text
    assert "rows  4  linear 1 -> 2\n" in text
    assert text.endswith("rows  8  end to end")
    said[torch.bfloat16] = ExactnessVerdict(
        exact=False, threads=1, rows=1, reason="it cannot", seconds=1.25, table=table[:1]
    )
    assert ": it cannot\n" in doctor._numerics(load(None, [source, "model.compute=bf16", "model.numerics=fast"]))


def test_the_doctor_downloads_nothing():
    text = doctor._numerics(load(None, ["model.source=nobody/nothing"]))
    assert text == "exact mode; measured at startup, once the model has been downloaded"


async def test_the_desk_refuses_only_what_it_was_told_to(tmp_path):
    for word, expected in (("label", None), ("refuse", CONTRACT.id)):
        config = load(None, [f"run.directory={tmp_path / word}", f"train.foreign_numerics={word}"])
        with open_log(config) as log:
            assert open_desk(config, log, contract=CONTRACT)._numerics == expected
            assert open_desk(config, log)._numerics is None


async def test_a_stamp_is_written_once_and_shown(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    older = replace(CONTRACT, threads=2)
    with open_log(config) as log:
        for _ in range(2):
            await stamp(log, older)
            await stamp(log, CONTRACT)
        assert log.newest() == 2
    seen = io.StringIO()
    console = Console(file=seen, width=140)
    await show_status(config, console)
    assert f"numerics {parts(older)}; differs from the newest: threads 2, not 1" in seen.getvalue()
    assert f"numerics {parts(CONTRACT)}\n" in seen.getvalue()
    await print_log(config, "contracts", 1, console)
    assert CONTRACT.to_json() in seen.getvalue()


def test_the_line_names_every_part():
    values = {name: f"<{name}>" for name in ("torch", "blas", "isa", "dtype", "quantisation", "kernels")}
    contract = Contract(mode="fast", threads=101, block=102, rows=103, **values)
    assert all(word in parts(contract) for word in (contract.id, "fast", "101", "102", "103", *values.values()))
    assert apart(contract, replace(contract, rows=4, dtype="x")) == "rows 4, not 103; dtype x, not <dtype>"
