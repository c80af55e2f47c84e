"""A worker's reports on itself: what its event loop does when it does not come round."""

import asyncio
import contextlib
import faulthandler
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.deadlines import PATIENT_S

from ostinato.app.trainer import open_desk
from ostinato.config import Config
from ostinato.core.records import Batch, PolicyVersion
from ostinato.core.samples import TrainingBatch
from ostinato.launch.placing import heartbeat as pulsing
from ostinato.launch.placing.heartbeat import Heartbeat, Sender, read_sign
from ostinato.launch.workers import train
from ostinato.launch.workers.train import ReportingTrainer
from ostinato.reward.config import RewardConfig, SurrogateConfig
from ostinato.reward.protocol import RewardRequest, Unloadable
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_sample, a_turn


async def test_what_the_loop_does_while_it_stands_still_is_written_down_once(monkeypatch, capfd):
    monkeypatch.setattr(pulsing, "BEAT_S", 0.01)
    monkeypatch.setattr(pulsing, "STALL_S", 0.2)
    lags, dumps = [], []

    def dump():
        faulthandler.dump_traceback(sys.__stderr__)
        dumps.append(True)

    monkeypatch.setattr(pulsing, "faulthandler", SimpleNamespace(dump_traceback=dump))
    monkeypatch.setattr(pulsing.logger, "warning", lambda _, lag_s: lags.append(lag_s))
    hears, says = os.pipe()
    try:
        sender = Sender(Heartbeat(), says, asyncio.get_running_loop(), lambda: None)
        the_culprit(sender.start, dumps, 0)
        assert len(lags) == 1
        assert lags[0] >= 0.2
        assert "in the_culprit" in capfd.readouterr().err
        while (before := len(dumps)) and sender._dumped:  # a machine that pauses meanwhile is one more that stood still
            await asyncio.sleep(0.01)
        the_culprit(lambda: None, dumps, before)
        assert len(lags) == before + 1
    finally:
        os.close(hears)  # which ends the thread
        await asyncio.to_thread(sender.join, PATIENT_S)
        os.close(says)


async def test_where_the_whole_process_stood_still_the_loop_did_not(monkeypatch):
    """As in a container that is frozen for a minute: a loop that came round before and comes round now is no reason to be killed."""
    ahead, freezes = [0.0], []

    def sleep(_):
        time.sleep(0.01)
        if not sender._probe_pending and len(freezes) < 3:
            ahead[0] += 60.0
            freezes.append(True)

    monkeypatch.setattr(pulsing, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=sleep))
    hears, says = os.pipe()
    os.set_blocking(hears, False)
    sender, heard, enough = Sender(Heartbeat(), says, asyncio.get_running_loop(), lambda: None), b"", 0
    sender.start()
    try:
        while not enough or heard.count(b"\n") < enough:
            with contextlib.suppress(BlockingIOError):
                heard += os.read(hears, 4096)
            if len(freezes) == 3 and not enough:
                enough = heard.count(b"\n") + 3  # those after the last one, too
            await asyncio.sleep(0.01)
        assert max(read_sign(line).lag_s for line in heard.splitlines()[:enough]) < 60.0
    finally:
        os.close(hears)  # which ends the thread
        await asyncio.to_thread(sender.join, PATIENT_S)
        os.close(says)


def the_culprit(begin, dumps, before):
    begin()
    until = time.monotonic() + PATIENT_S
    while len(dumps) == before:
        assert time.monotonic() < until
        time.sleep(0.01)


async def test_a_step_may_take_longer_in_proportion_if_it_holds_more_than_a_batch():
    pulse, limits = Heartbeat(), []

    class Watched:
        async def step(self, batch):
            limits.append(pulse.sign().limit_s)

    trainer = ReportingTrainer(Watched(), pulse, 60.0, 64)
    first = a_turn("a:0", prompt=range(62), sampled=(1, 2))
    second = replace(a_turn("b:0", prompt=range(94), sampled=(1, 2)), parent="a:0")
    apart = a_turn("c:0", prompt=range(94), sampled=(1, 2))
    for turns in ([first], [first, second], [first, second, apart]):
        row = Batch(step=1, turns=(), credits=(), reference=PolicyVersion(number=0, hash="0"), at=0.0)
        await trainer.step(TrainingBatch(row=row, samples=tuple(a_sample(turn, 1.0) for turn in turns)))
    assert limits == [60.0, 60.0 * 96 / 64, 60.0 * 192 / 64], "what a turn shares with its parent is computed once"


async def test_a_function_of_late_rewards_that_cannot_be_loaded_any_more_does_not_end_the_trainer(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (module := tmp_path / "late_function.py").write_text("def late(turn, signals, now):\n    return None\n")
    reward = RewardConfig(surrogate=SurrogateConfig(truth_after_s=1000.0, function="late_function:late"))
    desk = []

    async def learn(run, life, asker, late):
        desk.append(open_desk(run.config, MemoryLog(), asker=asker, late_asker=late))
        module.write_text("import gone\n")
        with pytest.raises(
            Unloadable, match=r"reward\.surrogate\.function"
        ):  # BadConfig would end the process for good
            await desk[0]._late_asker.ask([RewardRequest(turn=a_turn(), signals=(), now=1.0)])

    monkeypatch.setattr(train, "_learn", learn)
    life = SimpleNamespace(starting=lambda config: lambda what: None)
    await train._train(SimpleNamespace(config=Config(reward=reward)), life)
    assert desk


async def test_a_trouble_that_cannot_be_told_ends_no_heartbeat(monkeypatch):
    monkeypatch.setattr(pulsing, "BEAT_S", 0.01)
    pulse = Heartbeat()
    pulse.begin("serving")

    def changed_meanwhile():
        raise RuntimeError("dictionary changed size during iteration")

    pulse.trouble = changed_meanwhile
    hears, says = os.pipe()
    os.set_blocking(hears, False)
    sender, heard = Sender(pulse, says, asyncio.get_running_loop(), lambda: None), b""
    sender.start()
    try:
        while heard.count(b"\n") < 2:
            assert sender.is_alive(), "a worker without a heartbeat is killed"
            with contextlib.suppress(BlockingIOError):
                heard += os.read(hears, 4096)
            await asyncio.sleep(0.01)
        sign = read_sign(heard.split(b"\n")[1])
        assert sign is not None
        assert sign.doing == "serving"
        assert "dictionary changed size" in (sign.trouble or "")
    finally:
        os.close(hears)  # which ends the thread
        await asyncio.to_thread(sender.join, PATIENT_S)
        os.close(says)
