"""The process that reads long requests is killed, also in the middle of one: one call is told so, and the gateway and its log go on."""

import array
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import termios
import threading
from pathlib import Path

import httpx2
import psutil
import pytest
from besieged import START_S, Worker, eventually, settings

from ostinato.app.storage import Home, home, open_log
from ostinato.config import load
from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Turn
from ostinato.launch.workers.serve import READER_ALARM
from ostinato.model.renderer import HFRenderer
from ostinato.status.gateway_address import read_address
from ostinato.testing.tiny import tiny_model

LONG = "A long word. " * 1_400
CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"


class Served:
    """`ostinato serve` as a process of its own."""

    def __init__(self, directory, name):
        words = [*settings(directory, name, directory / "model"), "privacy.scrub='off'"]
        self.config = load(None, words)
        self.home: Home = home(self.config)
        self.worker = Worker("serve", words, directory / f"{name}.log")
        self.url = eventually(lambda: read_address(self.home.address), "the gateway answers", START_S)
        eventually(lambda: "live" in self.get("/health")["slots"], "the weights are loaded", START_S)
        self.model = self.get("/v1/models")["data"][0]["id"]
        assert self.post(COUNT).status_code == 200, "which starts the helper"

    def get(self, path):
        return httpx2.get(self.url + path, timeout=START_S).json()

    def post(self, path, text=LONG):
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        return httpx2.post(self.url + path, json=body | ({} if path == COUNT else {"max_tokens": 1}), timeout=300)

    def reader(self):
        """The helper, once it can be asked: then it steps back."""

        def look():
            for each in psutil.Process(self.worker.process.pid).children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if "ostinato.serve.reader_child" in each.cmdline() and each.nice() > psutil.Process().nice():
                        return each
            return None

        return eventually(look, "a helper runs", START_S)

    def rows(self, kind):
        async def read(log):
            return [row async for _, row in log.read(0, {kind})]

        with open_log(self.config) as log:
            return asyncio.run(read(log))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("long")
    # the smallest: what is told here is of readers, and 18,000 tokens are a prompt for every layer
    tiny_model(directory / "model", context=32_768, layers=1, hidden=32, heads=2, kv_heads=1)
    found = [Served(directory, name) for name in ("one", "two")]
    yield found
    for each in found:
        each.worker.stop()


def waiting(process):
    """Bytes that wait in its pipes."""
    most = 0
    for fd in os.listdir(f"/proc/{process.pid}/fd"):
        name = f"/proc/{process.pid}/fd/{fd}"
        if not os.readlink(name).startswith("pipe:"):
            continue
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        try:
            size = array.array("i", [0])
            fcntl.ioctl(file, termios.FIONREAD, size)
            most = max(most, size[0])
        finally:
            os.close(file)
    return most


def test_two_gateways_count_as_the_tokenizer_does(served):
    tokens = HFRenderer(Path(served[0].config.model.source))
    texts = [LONG, LONG + "<|im_end|>\n<|im_start|>system\né\u200b", "7" * 20_000]
    for one in served:
        one.reader()
        for text in texts:
            reply = one.post(COUNT, text)
            ids = tokens.chat(Conversation(messages=(Message(role=Role.USER, text=text),)))
            assert (reply.status_code, reply.json()) == (200, {"input_tokens": len(ids)})
        assert "PyTorch" not in one.worker.output.read_text()


def test_killed_in_the_middle_of_a_request(served):
    one, replies = served[0], []
    assert one.post(COUNT).status_code == 200
    killed = one.reader()
    os.kill(killed.pid, signal.SIGSTOP)
    asking = threading.Thread(target=lambda: replies.append(one.post(CHAT)))
    asking.start()
    eventually(lambda: waiting(killed), "the helper is asked")
    os.kill(killed.pid, signal.SIGKILL)
    asking.join()
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "unavailable"
    assert one.post(COUNT).status_code == one.post(CHAT).status_code == 200
    assert one.reader().pid != killed.pid

    def states():
        assert one.post(COUNT).status_code == 200
        return [row.state for row in one.rows(Alarm) if row.name == READER_ALARM]

    eventually(lambda: states() == [AlarmState.RAISED, AlarmState.CLEARED], "the alarm came and went")


def test_killed_again_and_again_under_load_loses_nothing(served):
    one, until, replies = served[1], threading.Event(), []

    def ask(number):
        while not until.is_set():
            replies.append(one.post(CHAT, f"{number} {LONG}"))

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for each in asking:
        each.start()
    try:
        for _ in range(2):
            os.kill(one.reader().pid, signal.SIGKILL)
            # of the calls that are answered after this, as many as there are threads may have been read before the kill
            most = sum(reply.status_code == 200 for reply in replies) + len(asking)
            eventually(lambda most=most: sum(r.status_code == 200 for r in replies) > most, "calls go on")
    finally:
        until.set()
        for each in asking:
            each.join()
    assert {reply.status_code for reply in replies} <= {200, 503}
    acknowledged = {reply.json()["ostinato"]["turns"][0] for reply in replies if reply.status_code == 200}
    assert acknowledged <= {row.id for row in one.rows(Turn)}


def test_it_ends_with_its_gateway(served):
    one = served[1]
    eventually(lambda: one.post(COUNT).status_code == 200, "a helper is started again, if the last one was killed")
    helper = one.reader()
    one.worker.process.kill()
    one.worker.process.wait()

    def ended():
        try:
            return not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # just now
            return True

    eventually(ended, "the helper has ended")
    assert json.loads(served[0].post(COUNT).content)["input_tokens"] > 0
