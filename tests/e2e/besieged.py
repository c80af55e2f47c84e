"""A served and learning run as processes, two of its customers, and somebody without a key: what `test_attacks.py` plays with."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx2
from tests.fakes.fork_server import FORK_SERVER

from ostinato.app.storage import Home, open_log
from ostinato.config import load
from ostinato.core.records import Delivered, Holdback, Quarantine, Reward, Turn
from ostinato.status.gateway_address import read_address
from ostinato.testing.tiny import tiny_model
from ostinato_client import sign_user

ACME_KEY, BOLT_KEY, CORA_KEY = "sk-acme-3f81c09a7d54", "sk-bolt-77e2a1c55b90", "sk-cora-0a92be4471d3"
DORA_KEY = "sk-dora-51d7c9e802fb"
ACME_SECRET, BOLT_SECRET = "users-of-acme-91c3f5", "users-of-bolt-62d8a4"
WINDOW_S = 40.0  # in which what a test does to a turn is done, on a busy machine too; all turns wait for it together
ONE_ADDRESS = 48  # connections that it may have, where there are no keys
PATIENT_S = 600.0
LONGEST_PAUSE_S = 0.5  # between two looks for what is waited for
START_S = 300.0  # on a busy machine

# so little that no machine is so slow that it does not use it up
LITTLE = "{calls_per_s=0.5, burst=5.0, open_samples=16, max_n=16, events_per_s=1.0, bytes_per_s=4194304}"

KEYED = (
    f"serve.api_keys=['acme:{ACME_KEY}', 'bolt:{BOLT_KEY}', 'cora:{CORA_KEY}', 'dora:{DORA_KEY}']",
    f"serve.user_keys=['acme:{ACME_SECRET}', 'bolt:{BOLT_SECRET}']",
    "serve.control_share=0.5",
    "serve.arm_users='verified'",
    "serve.max_inflight=36",
    "serve.quota={calls_per_s=40.0, burst=60.0, open_samples=16, max_n=16, events_per_s=250.0}",
    f"serve.tenant_quotas={{cora={LITTLE}, dora={LITTLE}}}",
    "reward.users='verified'",
    "reward.max_orphans=500",
    "reward.max_signals=20",
    "adapt={mode='dials', holdout=0.0}",
)


def settings(directory: Path, run: str, model: Path) -> list[str]:
    return [
        f"run.directory='{directory / run}'",
        f"model.source='{model}'",
        "model.dtype='float32'",
        "model.numerics='fast'",
        "listen.port=0",
        f"reward.options={{window={WINDOW_S}}}",
        "reward.settle_s=0.1",
        "reward.max_staleness=100",
        "learn.batch=16",
        "learn.publish_every=64",
        "learn.max_lead=64",
        "learn.poll_s=0.1",
        "train.compute='fp32'",
        "train.publish='fp32'",
        "follow.interval_s=0.2",
        "serve.store_timeout_s=120",  # a busy machine may take long
    ]


class Worker:
    """A process of `ostinato serve` or `ostinato train`."""

    def __init__(self, command: str, words: list[str], output: Path) -> None:
        self.output = output
        with output.open("ab") as file:
            self.process = FORK_SERVER.popen(
                [sys.executable, "-m", "ostinato.cli", command, *(w for word in words for w in ("--set", word))],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={"NO_COLOR": "1"},
            )

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Answer:
    """What a model call came back with."""

    status: int
    headers: httpx2.Headers
    body: dict

    @property
    def turn(self) -> str:
        assert self.status == 200, self.body
        return self.body["ostinato"]["turns"][0]

    @property
    def text(self) -> str:
        return self.body["choices"][0]["message"]["content"]

    @property
    def error(self) -> str:
        return self.body["error"]["code"]


class Asker:
    """Somebody who talks to the gateway with a key of theirs, or none.

    Who is `patient` waits where a quota is used up, unless a call says otherwise: a quick machine comes to it sooner.
    """

    _ids = itertools.count()

    def __init__(
        self, url: str, model: str, key: str | None = None, secret: str = "", *, patient: bool = False
    ) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx2.Client(base_url=url, headers=headers, timeout=PATIENT_S)
        self.model, self._secret, self._patient = model, secret, patient

    def ask(self, text="hi", *, headers=None, signed=None, patient=True, **fields) -> Answer:
        """A short model call; `signed` names a user whom the tenant vouches for."""
        body = {"model": self.model, "messages": talk(text), "max_tokens": 4, **fields}
        more = dict(headers or {})
        if signed is not None:
            body["user"] = signed
            more["x-ostinato-user-signature"] = sign_user(self._secret, signed)
        reply = self._call("/v1/chat/completions", body, more, patient)
        return Answer(reply.status_code, reply.headers, reply.json())

    def event(self, target, name="accepted", value=True, **fields) -> dict:
        id = f"event-{next(self._ids)}"
        return {"id": id, "target": target, "name": name, "value": value, "source": "human"} | fields

    def post(self, event, *, patient=True) -> tuple[int, object]:
        """The status and what became of the event, or of each in a list."""
        reply = self._call("/v1/feedback", event, {}, patient)
        return reply.status_code, reply.json()

    def _call(self, path: str, body, headers: dict, patient: bool) -> httpx2.Response:
        return self._until_let(lambda: self.http.post(path, json=body, headers=headers), patient)

    def dials(
        self, method="GET", user="ann", body=None, *, signed: str | None = None, **headers: str
    ) -> httpx2.Response:
        """A call about a user's dials; `signed` names whom the tenant vouches for, the user itself if None, nobody if empty."""
        if signature := sign_user(self._secret, signed or user) if signed != "" else "":
            headers["x-ostinato-user-signature"] = signature
        given = {"x-ostinato-user": user, **headers}
        return self._until_let(lambda: self.http.request(method, "/v1/adaptation", json=body, headers=given))

    def _until_let(self, post, patient: bool = True) -> httpx2.Response:
        """The answer that is not about a patient caller's own quota."""
        deadline = time.monotonic() + PATIENT_S
        while True:
            reply = post()
            if not (patient and self._must_wait(reply, deadline)):
                return reply

    def _must_wait(self, reply: httpx2.Response, deadline: float) -> bool:
        """Whether a patient caller's quota was used up; it has waited then, and may call again."""
        if not self._patient or reply.status_code != 429 or time.monotonic() > deadline:
            return False
        time.sleep(int(reply.headers.get("retry-after-ms", 100)) / 1000)
        return True

    def send(self, path: str, body: bytes, headers: dict | None = None) -> httpx2.Response:
        """A body as it is, said to be JSON."""
        headers = {"content-type": "application/json"} | (headers or {})
        return self._until_let(lambda: self.http.post(path, content=body, headers=headers))

    def say(self, target, name="accepted", value=True, **fields) -> str:
        """What became of one event."""
        code, answer = self.post(self.event(target, name, value, **fields))
        assert code == 202, answer
        return answer["status"]

    @contextlib.contextmanager
    def stream(self, *, headers=None, **fields):
        """A streamed call that goes on while the block runs: its lines, and the turn's id from the head."""
        body = {"model": self.model, "messages": talk("go on"), "max_tokens": 400, "stream": True, **fields}
        deadline = time.monotonic() + PATIENT_S
        while True:
            with self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
                if not self._must_wait(reply, deadline):
                    assert reply.status_code == 200, reply.read()
                    yield reply.headers["x-ostinato-turn"].split(",")[0], reply.iter_lines()
                    return


class Siege:
    """A run, its URL, and who is around: the customers acme, its rival bolt, and cora and dora, who may do little; others."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.config = load(None, words)
        self.home = Home(self.config.run.directory)
        self.url = eventually(lambda: read_address(self.home.address), "the gateway answers", START_S)
        eventually(lambda: {"live", "control"} <= self.health()["slots"].keys(), "the weights are loaded", START_S)
        self.model = self.health()["model"]
        self.acme = Asker(self.url, self.model, ACME_KEY, ACME_SECRET)
        self.bolt = Asker(self.url, self.model, BOLT_KEY, BOLT_SECRET, patient=True)
        self.cora = Asker(self.url, self.model, CORA_KEY, patient=True)
        self.dora = Asker(self.url, self.model, DORA_KEY, patient=True)
        self.operator = Asker(self.url, self.model, self.home.admin_key())
        self.outsider = Asker(self.url, self.model)

    def close(self) -> None:
        for asker in (self.acme, self.bolt, self.cora, self.dora, self.operator, self.outsider):
            asker.http.close()

    def health(self) -> dict:
        return httpx2.get(f"{self.url}/health", headers={"x-api-key": self.home.admin_key()}, timeout=PATIENT_S).json()

    def rows(self, *kinds: type) -> list:
        """Every row of these kinds, in order."""

        async def read(log):
            return [row async for _, row in log.read(0, set(kinds))]

        with open_log(self.config) as log:
            return asyncio.run(read(log))

    def find(self, kind: type, identity: str):
        """The row of this kind about a turn, or None."""
        with open_log(self.config) as log:
            return next(iter(asyncio.run(log.find(kind, [(identity,)]))), None)

    def turn(self, id: str) -> Turn:
        return eventually(lambda: self.find(Turn, id), f"turn {id} is in the log")

    def reward(self, id: str) -> float:
        """What the trainer's process made of a turn's signals. Fails where it was quarantined."""

        def decided():
            return self.find(Reward, id) or self.find(Quarantine, id)

        row = eventually(decided, f"turn {id} has a reward")
        assert isinstance(row, Reward), row
        return row.value

    def holdback(self, id: str) -> str:
        return eventually(lambda: self.find(Holdback, id), f"turn {id} has an outcome").reason

    def delivered(self) -> set[str]:
        return {turn for row in self.rows(Delivered) for turn in row.turns}

    def number(self, name: str) -> float:
        """One of the operator's metrics."""
        page = self.operator.http.get("/metrics").text
        return float(next(line for line in page.splitlines() if line.startswith(f"{name} ")).split()[1])

    def cpu_s(self) -> float:
        """Seconds of processor time that the serving process has used."""
        pid = int((self.home.root / ".serve.lock").read_text().split()[0])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def raw(self, data: bytes) -> bytes:
        """All that comes back over a connection of its own, which the server must close: TimeoutError where it does not."""
        with self.connect() as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65_536):
                    answer += piece
            return answer

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection from this address of this machine."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENT_S, source_address=(source, 0))


def talk(*texts: str) -> list[dict[str, str]]:
    """A conversation: the user's and the assistant's words in turn."""
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def request(method: str, path: str, body: object = None, **headers: str) -> bytes:
    """The bytes of a request after which the connection ends."""
    data = b"" if body is None else json.dumps(body).encode()
    kind = {} if body is None else {"content-type": "application/json"}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = {"host": "127.0.0.1", "connection": "close", "content-length": str(len(data)), **kind, **given}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


def hear(connection: socket.socket) -> bytes:
    """One whole answer over a connection that may go on; what there is of it where the connection ends before."""
    data = b""
    while not (found := re.search(rb"content-length: (\d+)\r\n(?s:.*?)\r\n\r\n", data)) or len(
        data
    ) < found.end() + int(found[1]):
        if not (piece := connection.recv(65_536)):
            break
        data += piece
    return data


def status(answer: bytes) -> int:
    """The status of a raw answer; 0 if there was none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def eventually(look, what: str, timeout_s: float = PATIENT_S):
    """The first truthy thing that `look` sees. It looks ever more rarely: each look at a log opens it anew."""
    ends, pause_s = time.monotonic() + timeout_s, 0.03
    while time.monotonic() < ends:
        with contextlib.suppress(httpx2.TransportError):
            if found := look():
                return found
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


@contextlib.contextmanager
def besieged(directory: Path):
    """A run with keys that learns, and one without keys that only serves: (with, without)."""
    model = tiny_model(directory / "model")
    words = {name: settings(directory, name, model) for name in ("keyed", "keyless")}
    words["keyed"] += KEYED
    words["keyless"].append(f"serve.connections_per_address={ONE_ADDRESS}")
    workers = [
        Worker(command, words[name], directory / f"{name}-{command}.log")
        for name, command in (("keyed", "serve"), ("keyless", "serve"), ("keyed", "train"))
    ]
    try:
        with contextlib.closing(Siege(words["keyed"])) as keyed, contextlib.closing(Siege(words["keyless"])) as keyless:
            yield keyed, keyless
    except AssertionError as error:
        said = "\n".join(worker.output.read_text()[-2000:] for worker in workers)
        raise AssertionError(f"{error}\n{said}") from error
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.stop()
