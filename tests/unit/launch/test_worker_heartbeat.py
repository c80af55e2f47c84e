"""A worker's reports on itself: what its event loop does when it does not come round."""

import asyncio
import faulthandler
import os
import sys
import threading
from types import SimpleNamespace

from tests.deadlines import PATIENT_S

from ostinato.launch.workers import heartbeat as pulsing
from ostinato.launch.workers.heartbeat import Heartbeat, Sender


async def test_what_the_loop_does_while_it_stands_still_is_written_down_once(monkeypatch, capfd):
    monkeypatch.setattr(pulsing, "BEAT_S", 0.01)
    monkeypatch.setattr(pulsing, "STILL_S", 0.2)
    lags, told = [], threading.Event()

    def dump():
        faulthandler.dump_traceback(sys.__stderr__)
        told.set()

    monkeypatch.setattr(pulsing, "faulthandler", SimpleNamespace(dump_traceback=dump))
    monkeypatch.setattr(pulsing.logger, "warning", lambda _, lag_s: lags.append(lag_s))
    hears, says = os.pipe()
    try:
        sender = Sender(Heartbeat(), says, asyncio.get_running_loop(), lambda: None)
        sender.start()
        the_culprit(told)
        assert len(lags) == 1
        assert lags[0] >= 0.2
        assert "in the_culprit" in capfd.readouterr().err
        told.clear()
        while sender._told:
            await asyncio.sleep(0.01)
        the_culprit(told)
        assert len(lags) == 2
    finally:
        os.close(hears)  # which ends the thread
        await asyncio.to_thread(sender.join, PATIENT_S)
        os.close(says)


def the_culprit(told):
    assert told.wait(PATIENT_S)
