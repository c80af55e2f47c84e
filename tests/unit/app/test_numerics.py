"""Contracts from configuration to log to screen."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from ostinato.app import machine, numerics
from ostinato.app.machine import Measured
from ostinato.app.numerics import (
    NumericsMode,
    engine_contract,
    engine_threads,
    numerics_mode,
    resolve,
    stamp,
    threads_agree,
    trainer_contract,
    training,
)
from ostinato.app.storage import open_log
from ostinato.app.trainer import open_desk
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.notices import Stamp
from ostinato.core.numerics import Contract, contract_in_words, differences, differences_in_words
from ostinato.engine.embedded.form import prepack
from ostinato.engine.embedded.fused import EngineForm, Reach
from ostinato.launch.commands import doctor
from ostinato.launch.commands.checks import check_start
from ostinato.launch.commands.log import print_log
from ostinato.launch.commands.status import show_status
from ostinato.model import selftest, speed
from ostinato.model.selftest import REMEDY, ExactnessVerdict
from ostinato.model.speed import Speeds
from ostinato.testing.engine import CONTRACT
from ostinato.testing.tiny import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return f"model.source={tiny_model(tmp_path_factory.mktemp('numerics') / 'tiny', layers=1)}"


def verdict_of(reason="", *, threads=1, seconds=0.1, table=(), library=(), definitions=()):
    return ExactnessVerdict(
        exact=not reason,
        threads=threads,
        reason=reason,
        seconds=seconds,
        table=table,
        library=library,
        definitions=definitions,
    )


@pytest.fixture
def verdicts(monkeypatch):
    """What the self-test shall say, by dtype; and which it was asked."""
    said, asked = {}, []

    def examined(config, dtype, threads):
        asked.append((dtype, threads))
        return Measured(value=said.get(dtype, verdict_of()), at=0.0, file=None)

    monkeypatch.setattr(numerics, "_examined", examined)
    monkeypatch.setattr(numerics, "cores", lambda: 2)
    return said, asked


def timed(bf16, fp32=10.0, load=0.0, teams=()):
    """Speeds of one product, in GFLOP/s: on one thread in both dtypes, and by (threads, speed)."""

    def product(dtype, threads, gflops):
        return speed.Speed(inputs=8, outputs=8, rows=4, threads=threads, dtype=dtype, gflops=gflops)

    alone = (product("bfloat16", 1, bf16), product("float32", 1, fp32))
    return Speeds(dtypes=alone, teams=tuple(product("float32", *each) for each in teams), load=load, cores=2)


@pytest.fixture
def speeds(monkeypatch):
    """What the products' speeds shall be: ``speeds(timed(bf16=30.0))``."""

    def are(found):
        monkeypatch.setattr(numerics, "speeds", lambda config: Measured(value=found, at=0.0, file=None))

    are(timed(bf16=30.0))
    return are


@pytest.mark.parametrize(("bf16", "dtype"), [(30.0, "bfloat16"), (2.0, "float32")])
def test_engine_and_trainer_agree_by_default_on_any_cpu(source, verdicts, speeds, bf16, dtype):
    speeds(timed(bf16=bf16))
    config = load(None, [source])
    assert engine_contract(config) == trainer_contract(config)
    assert (engine_contract(config).mode, engine_contract(config).dtype) == ("exact", dtype)
    assert training(config).compute == {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    assert training(config).publish == "bf16"


@pytest.mark.parametrize(("dtype", "publish"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_weights_are_published_as_they_are_stored(source, dtype, publish):
    """Else version 0 and the trainer's rounding of it differ, which looks like a broken promise of exact mode."""
    config = load(None, [source, f"model.dtype={dtype}", "train.compute=fp32"])
    assert training(config).publish == publish
    assert (
        training(load(None, [source, f"model.dtype={dtype}", "train.compute=fp32", "train.publish=bf16"])).publish
        == "bf16"
    )


def test_the_dtype_is_measured_only_where_that_decides(source, monkeypatch):
    monkeypatch.setattr(numerics, "speeds", lambda config: pytest.fail("measured"))
    assert numerics.compute(load(None, [source, "model.compute=fp32"])) is torch.float32
    assert numerics.compute(load(None, [source, "model.compute=bf16"])) is torch.bfloat16
    assert numerics.compute(load(None, [source, "model.dtype=float32"])) is torch.float32


def test_the_engine_takes_the_cores_that_the_trainer_leaves_and_that_pay(source, speeds, monkeypatch):
    def threads(here, *words):
        monkeypatch.setattr(numerics, "cores", lambda: here)
        return engine_threads(load(None, [source, *words]))

    speeds(timed(bf16=5.0, teams=((1, 10.0), (2, 18.0), (4, 34.0), (8, 35.0))))
    assert [threads(here) for here in (1, 2, 3, 4, 5, 16)] == [1, 1, 2, 3, 4, 4]
    assert threads(16, "train.threads=7", "train.ranks=2") == 2
    assert threads(1, "engine.threads=6") == 6
    assert threads(16, "model.kernels=torch") == 1


def test_auto_is_exact_where_the_self_test_says_so_and_fast_with_its_reason_where_not():
    good, bad = verdict_of(), verdict_of(f"linear 8 -> 8 gives other bits at 32 rows; {REMEDY}")
    assert resolve("auto", "own", "plain", lambda: [good, good]) == NumericsMode(mode="exact")
    found = resolve("auto", "own", "plain", lambda: [good, bad])
    assert found == NumericsMode(mode="fast", why="linear 8 -> 8 gives other bits at 32 rows")
    assert "numerics: fast, as linear 8 -> 8 gives other bits at 32 rows; " in str(found)
    assert "\n" not in str(found)
    assert "the trainer corrects" in str(found)


@pytest.mark.parametrize(
    ("asked", "kernels", "products", "mode", "why"),
    [
        ("exact", "own", "plain", "exact", ""),
        ("fast", "own", "plain", "fast", ""),
        ("auto", "torch", "plain", "fast", "torch's kernels"),
        ("auto", "own", "int8", "fast", "engine.products = 'int8'"),
    ],
)
def test_what_needs_no_self_test_gets_none(asked, kernels, products, mode, why):
    found = resolve(asked, kernels, products, lambda: pytest.fail("examined"))
    assert (found.mode, why in found.why, bool(found.why)) == (mode, True, bool(why))


def test_engine_and_trainer_take_one_mode_even_if_only_ones_dtype_is_exact(source, verdicts):
    said, _ = verdicts
    said[torch.bfloat16] = verdict_of("other bits")
    config = load(None, [source, "model.compute=fp32", "train.compute=bf16"])
    assert numerics_mode(config) == NumericsMode(mode="fast", why="other bits")
    assert (engine_contract(config).mode, trainer_contract(config).mode) == ("fast", "fast")


def test_where_exact_mode_cannot_hold_auto_starts_in_fast_mode_with_turns_of_the_trainers_contract(source, verdicts):
    said, _ = verdicts
    said[torch.bfloat16] = verdict_of("other bits")
    config = load(None, [source, "model.compute=bf16", "train.threads=2", "train.foreign_numerics=refuse"])
    assert engine_contract(config) == trainer_contract(config)
    assert (engine_contract(config).mode, threads_agree(config)) == ("fast", True)


def test_engine_and_trainer_share_a_contract_unless_set_apart(source, verdicts):
    for compute in ("bf16", "fp32"):
        config = load(None, [source, f"model.compute={compute}"])
        assert engine_contract(config) == trainer_contract(config)
        assert training(config).compute == compute
    other = load(None, [source, "model.compute=bf16", "train.compute=fp32", "train.threads=2", "engine.block=64"])
    assert differences(engine_contract(other), trainer_contract(other)) == ("blas", "dtype"), (
        "with the bits of its products"
    )


def test_threads_are_part_of_the_contract_only_where_they_change_bits(source, monkeypatch):
    def examined(config, dtype, threads):
        found = verdict_of("" if len(threads) == 1 else "no", threads=threads[0])
        return Measured(value=found, at=0.0, file=None)

    monkeypatch.setattr(numerics, "cores", lambda: 2)
    config = load(None, [source, "model.compute=bf16", "train.threads=2"])
    monkeypatch.setattr(numerics, "_examined", lambda *_: examined("", torch.bfloat16, (1,)))
    assert engine_contract(config) == trainer_contract(config)
    monkeypatch.setattr(numerics, "_examined", examined)
    assert "threads" in differences(engine_contract(config), trainer_contract(config))


def test_the_library_is_part_of_the_contract_only_where_it_computes(source, verdicts):
    said, asked = verdicts
    said[torch.float32] = verdict_of(library=("gelu",))
    config = load(None, [source, "model.compute=bf16", "train.compute=fp32", "train.threads=2"])
    assert (engine_contract(config).torch, engine_contract(config).isa) == ("", "")
    assert trainer_contract(config).torch == torch.__version__.partition("+")[0]
    assert set(asked) == {(torch.bfloat16, (1, 2)), (torch.float32, (1, 2))}


def test_a_definition_that_few_models_use_is_in_the_contract_of_those_that_do(source, verdicts):
    said, _ = verdicts
    config = load(None, [source, "model.compute=bf16"])
    before = engine_contract(config)
    said[torch.bfloat16] = verdict_of(definitions=("gelu_tanh 7",))
    assert "gelu_tanh 7" in engine_contract(config).kernels
    assert engine_contract(config) == trainer_contract(config)
    assert differences(engine_contract(config), before) == ("kernels",)


def test_exact_mode_is_refused_where_it_cannot_hold_and_fast_mode_never_asks(source, verdicts):
    said, asked = verdicts
    said[torch.bfloat16] = verdict_of("no; set it to fast")
    with pytest.raises(BadConfig, match="no; set it to fast"):
        engine_contract(load(None, [source, "model.compute=bf16", "model.numerics=exact"]))
    asked.clear()
    fast = engine_contract(load(None, [source, "model.compute=bf16", "model.numerics=fast"]))
    assert (fast.mode, asked) == ("fast", [])


INT8 = ["engine.products=int8", "model.compute=fp32"]


def test_whole_numbers_are_a_contract_of_their_own(source):
    config = load(None, [source, *INT8])
    assert differences(engine_contract(config), trainer_contract(config)) == ("quantisation",)
    found = numerics.integers(config)
    assert engine_contract(config).quantisation == found.name
    assert "255 levels" in found.name
    assert numerics.integers(load(None, [source])) is None


def test_whole_numbers_are_refused_where_their_turns_could_not_be_what_was_promised(source):
    with pytest.raises(BadConfig, match=r"engine\.products = 'int8' .* leave model\.numerics out"):
        engine_contract(load(None, [source, *INT8, "model.numerics=exact"]))
    with pytest.raises(BadConfig, match=r"train\.foreign_numerics = 'refuse' .* set it to 'label'"):
        engine_contract(load(None, [source, *INT8, "train.foreign_numerics=refuse"]))
    for where in (["model.kernels=torch"], ["model.device=auto", "model.numerics=fast"]):
        with pytest.raises(BadConfig, match=r"set model\.kernels = 'own' and model\.device = 'cpu'"):
            engine_contract(load(None, [source, *INT8, *where]))
    with pytest.raises(BadConfig, match=r"engine\.products = 'int8' is the embedded engine's"):
        load(None, [*INT8, "engine.kind=vllm", 'engine.urls=["http://one:1"]'])


FP8 = ["engine.products=fp8", "model.kernels=torch", "model.compute=bf16"]


def test_eight_bit_floats_are_a_contract_of_their_own_and_for_torchs_kernels_only(source):
    config = load(None, [source, *FP8])
    assert differences(engine_contract(config), trainer_contract(config)) == ("quantisation",)
    assert "fp8" in engine_contract(config).quantisation
    for where in (["model.kernels=own"], ["model.kernels=auto"]):
        with pytest.raises(BadConfig, match=r"engine\.products = 'fp8' .* set model\.kernels = 'torch'"):
            engine_contract(load(None, [source, *FP8, *where]))
    with pytest.raises(BadConfig, match=r"engine\.products = 'fp8' .* leave model\.numerics out"):
        engine_contract(load(None, [source, *FP8, "model.numerics=exact"]))


async def test_up_refuses_them_before_anything_is_started(tmp_path, source):
    place = f"run.directory={tmp_path / 'run'}"
    config = load(None, [source, "engine.products=int8", "model.numerics=exact", place, "evaluate.suite="])
    with pytest.raises(BadConfig, match=r"leave model\.numerics out"):
        await check_start(config)


def test_the_doctor_says_where_whole_numbers_are_slower(source, verdicts, monkeypatch):
    config = load(None, [source, *INT8])
    monkeypatch.setattr(numerics, "pace", lambda _: {1: 0.5, 128: 2.0})
    assert doctor._numerics(config).endswith("slower here than engine.products = 'plain': 0.5x at 1 stream")
    monkeypatch.setattr(numerics, "pace", lambda _: {1: 1.5, 128: 2.0})
    assert doctor._numerics(config).endswith("one thread: 1.5x at 1 stream, 2.0x at 128 streams")


@pytest.fixture
def examinations(monkeypatch):
    """The self-tests that were run."""
    calls = []

    def examine(path, dtype, threads, pack, block):
        assert pack is prepack
        calls.append((dtype, threads, block))
        return verdict_of(table=("linear 1 -> 2",), library=("gelu",))

    monkeypatch.setattr(selftest, "examine", examine)
    monkeypatch.setattr(numerics, "cores", lambda: 2)
    return calls


def test_the_verdict_is_kept_for_other_processes_and_later_starts(source, examinations, tmp_path, monkeypatch):
    words = [source, "model.compute=bf16", f"model.cache={tmp_path / 'cache'}"]
    config = load(None, words)
    assert engine_contract(config) == trainer_contract(config)
    machine._KNOWN.clear()  # as another process
    assert engine_contract(config).torch, "the library that the kept verdict names"
    assert examinations == [(torch.bfloat16, (1,), 32)]
    for changed in (["model.compute=fp32"], ["train.threads=2"], ["engine.block=64"]):
        engine_contract(load(None, [*words, *changed]))
    assert examinations[1:] == [
        (torch.float32, (1,), 32),
        (torch.bfloat16, (1, 2), 32),
        (torch.bfloat16, (1,), 64),
    ]
    monkeypatch.setattr(
        "ostinato.model.numerics.probe", lambda *_: "0badf00d"
    )  # as after another library was installed
    engine_contract(config)
    assert len(examinations) == 5


def test_speeds_of_a_busy_machine_are_not_believed_for_good(source, tmp_path, monkeypatch):
    now, measures = 1000.0, iter([timed(bf16=5.0, load=3.5), timed(bf16=30.0), timed(bf16=7.0)])
    monkeypatch.setattr(machine, "wall_clock", lambda: now)
    monkeypatch.setattr(speed, "measure", lambda *_: next(measures))
    config = load(None, [source, f"model.cache={tmp_path / 'cache'}"])

    def dtype():
        machine._KNOWN.clear()  # as another process
        return numerics.choice(config).dtype

    assert [dtype(), dtype()] == ["float32", "float32"]
    now += 3601.0
    assert [dtype(), dtype()] == ["bfloat16", "bfloat16"]
    now += 3601.0
    assert dtype() == "bfloat16"


def test_the_doctor_shows_what_was_tested_and_when(source, examinations, speeds, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", [("numerics", doctor._numerics)])
    words = [source, "model.compute=bf16", f"model.cache={tmp_path / 'cache'}"]
    text = doctor._numerics(load(None, words))
    assert "self-test, 0.1 s, 1 thread: exact mode holds; measured on " in text
    assert f"kept in {tmp_path / 'cache' / 'machine' / 'exact-'}" in text
    assert text.endswith("  linear 1 -> 2")
    doctor.examine(load(None, [*words, f"run.directory={tmp_path / 'run'}"]), Console(file=io.StringIO()))
    assert len(examinations) == 1
    config = load(None, [*words, f"run.directory={tmp_path / 'run'}"])
    doctor.examine(config, Console(file=io.StringIO()), again=True)
    assert len(examinations) == 2


def test_the_doctor_says_what_would_be_exact(source, verdicts, speeds):
    said, _ = verdicts
    said[torch.bfloat16] = verdict_of("it cannot")
    text = doctor._numerics(load(None, [source]))
    assert "= fast, bfloat16" in text
    assert "numerics: fast, as it cannot; " in text
    assert text.endswith("exact mode holds here with model.compute = 'fp32'")
    said[torch.float32] = verdict_of("nor can it")
    assert doctor._numerics(load(None, [source])).endswith("exact mode does not hold, either: nor can it")


def test_the_doctor_shows_the_speeds_and_what_to_set(source, speeds, monkeypatch):
    monkeypatch.setattr(numerics, "cores", lambda: 2)
    config = load(None, [source])
    speeds(timed(bf16=5.0, teams=((1, 10.0), (2, 18.0))))
    text = doctor._speed(config)
    assert text.startswith("the engine computes in float32, the trainer in fp32; float32 is faster here: bf16 at 0.5x")
    assert "8 -> 8,   4 rows: bfloat16 5 GFLOP/s, float32 10 GFLOP/s" in text
    assert "1.8x with 2: where no other worker needs the cores, set engine.threads or train.threads to 2" in text
    speeds(timed(bf16=5.0, load=3.5, teams=((1, 10.0), (2, 18.0))))
    assert "busy (load 3.5 on 2 cores): measure again when it is idle (`ostinato doctor --again`)" in doctor._speed(
        config
    )


def test_the_doctor_downloads_nothing():
    text = doctor._numerics(load(None, ["model.source=nobody/nothing"]))
    assert text == "auto mode; measured at startup, once the model has been downloaded"


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
    assert f"numerics {contract_in_words(older)}; differs from the newest: threads 2, not 1" in seen.getvalue()
    assert f"numerics {contract_in_words(CONTRACT)}\n" in seen.getvalue()
    await print_log(config, "contracts", 1, console)
    assert CONTRACT.to_json() in seen.getvalue()


async def test_a_contract_is_shown_under_the_id_that_turns_have(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    stored = json.dumps(json.loads(CONTRACT.to_json()) | {"rows": 1})  # a field that is read and left out
    with open_log(config) as log:
        await log.append(Stamp(id="0123456789abcdef", contract=stored, at=1.0))
    seen = io.StringIO()
    await show_status(config, Console(file=seen, width=140))
    assert f"numerics {contract_in_words(CONTRACT, '0123456789abcdef')}\n" in seen.getvalue()


def test_the_line_names_every_part():
    values = {name: f"<{name}>" for name in ("torch", "blas", "isa", "dtype", "quantisation", "kernels")}
    contract = Contract(mode="fast", threads=101, block=102, **values)
    assert all(word in contract_in_words(contract) for word in (contract.id, "fast", "101", "102", *values.values()))
    assert (
        differences_in_words(contract, replace(contract, block=4, dtype="x"))
        == "block 4, not 102; dtype x, not <dtype>"
    )


def test_the_engines_form_is_tried_once_on_a_machine(source, tmp_path, monkeypatch):
    config = load(None, [source, f"model.cache='{tmp_path}'"])
    path, found, trials = numerics.model_path(config), EngineForm((Reach(scale=0.1, window=16),)), []

    def form_of(architecture, dtype, name="condensed"):
        def trial():
            trials.append((architecture, dtype, name))
            return found

        monkeypatch.setattr(machine, "_KNOWN", {})  # as in another process
        return numerics.form(config, path, name, architecture, dtype, trial)

    for _ in range(2):
        assert form_of("one", torch.bfloat16) == found
    others = [
        ("two", torch.bfloat16, "condensed"),
        ("one", torch.float32, "condensed"),
        ("one", torch.bfloat16, "fused"),
    ]
    for other in others:
        form_of(*other)
    assert trials == [("one", torch.bfloat16, "condensed"), *others]
    monkeypatch.setattr(machine, "_code", lambda: "another")
    form_of("one", torch.bfloat16)
    assert len(trials) == 5, "other code may compute other bits"
