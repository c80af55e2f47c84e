"""The product's side: feedback that counts once, in bounded time, and never holds a program up."""

import ast
import asyncio
import contextlib
import http.client
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.fakes.proxy import LosesAnswers
from tests.unit.adapt.people import BASIS, cache_at

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.core.records import Source, SteeringBasis
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato_client import AsyncOstinato, Event, NotAllowed, NotTaken, Ostinato, Receipt, Refused, sign_user
from ostinato_client.background import Background
from ostinato_client.sending import ATTEMPT, Sender

KEY = "sk-0123456789abcdef"
PACKAGE = Path(__file__).parents[3] / "client" / "src"


def app(log, *keys, adaptation=None, **config):
    return create_app(
        engine=FakeEngine(),
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(api_keys=keys, **config),
        clock=lambda: 1000.0,
        model_name="m",
        adaptation=adaptation,
    )


@contextlib.contextmanager
def answering(answers):
    """A server that answers each POST with the next of these functions of its handler; yields URL and the bodies."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            answers[min(len(bodies), len(answers)) - 1](self)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(status, body=b'{"id":"e","status":"accepted"}', length=None, **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def attempts():
    return [thread for thread in threading.enumerate() if thread.name == ATTEMPT]


async def test_both_clients_retry_with_one_id_and_count_once():
    log = MemoryLog()
    async with serving(LosesAnswers(app(log), 2)) as url:
        sent = await asyncio.to_thread(Ostinato(url).feedback, "R", "accepted", True)
        async with AsyncOstinato(url + "/v1/") as client:
            other = await client.feedback("R:1", "undone", 0.5, source="code", occurred_at=3.0, comment="c", id="mine")
    first, second = log.signals()
    assert (first.id, first.turn, first.name, first.value) == (sent.id, "R:0", "accepted", 1.0)
    assert sent.status == "early"
    assert (second.id, second.turn, second.occurred_at, second.source) == ("mine", "R:1", 3.0, Source.CODE)
    assert other == Receipt("mine", "early")


async def test_many_go_in_lists_of_a_thousand():
    log = MemoryLog()
    events = [Event(f"R{i}", "accepted", True) for i in range(2500)]
    async with serving(app(log)) as url, AsyncOstinato(url, deadline_s=30) as client:
        receipts = await client.feedback_many(events)
        assert await client.feedback_many([]) == []
    assert [receipt.id for receipt in receipts] == [event.id for event in events] == [s.id for s in log.signals()]


async def test_clients_say_what_is_wrong():
    log = MemoryLog()
    async with serving(app(log, KEY)) as url:
        with pytest.raises(NotAllowed):
            await asyncio.to_thread(Ostinato(url).feedback, "R", "accepted", True)
        with pytest.raises(Refused, match="name") as caught:
            await asyncio.to_thread(Ostinato(url, KEY).feedback, "R", "not a name", True)
        assert caught.value.field == "name"
        log.full = True
        for deadline_s in (0.3, 3.0, 30.0):  # a busy machine may need longer for an answer
            async with AsyncOstinato(url, KEY, deadline_s=deadline_s) as client:
                with pytest.raises(NotTaken) as told:
                    await client.feedback("R", "accepted", True)
            if "507" in str(told.value):
                break
        assert "507" in str(told.value)
    for bad in ("file:///etc/passwd", "127.0.0.1:8321", ""):
        with pytest.raises(ValueError, match="base_url"):
            Ostinato(bad)


def drips(handler):
    handler.send_response(202)
    handler.send_header("content-length", "1000000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)


def hangs(handler):
    handler.connection.recv(1)  # until the client leaves


@pytest.mark.parametrize("answer", [reply(503), reply(429, retry_after="1000"), drips, hangs])
def test_nobody_waits_beyond_the_deadline(answer):
    """None of these servers ever takes the event: a client without a deadline would not come back."""
    with answering([answer]) as (url, _):
        began = time.monotonic()
        with pytest.raises(NotTaken, match=r"0\.4 s"):
            Ostinato(url, deadline_s=0.4).feedback("R", "accepted", True)
        assert time.monotonic() - began < PATIENT_S


def test_a_name_that_is_looked_up_for_ever_costs_no_more_than_the_deadline(monkeypatch):
    found, told = threading.Event(), []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found.wait() and [])

    def ask():
        with pytest.raises(NotTaken) as caught:
            Ostinato("http://gateway.invalid", deadline_s=0.2).feedback("R", "accepted", True)
        told.append(str(caught.value))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENT_S)
    found.set()
    assert ["0.2 s" in each for each in told] == [True], "it still waits"


@pytest.mark.parametrize("way", ["http", "https", "proxy"])
def test_what_was_given_up_is_not_sent_later(monkeypatch, way):
    """Else a choice that nobody took would replace the next one."""
    found, look = threading.Event(), socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found.wait() and look(*args, **more))
    # without the handshake, which this server does not know
    monkeypatch.setattr(http.client.HTTPSConnection, "connect", http.client.HTTPConnection.connect)
    for name in ("no_proxy", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with answering([reply(202)]) as (url, bodies):
        if way == "proxy":
            monkeypatch.setenv("http_proxy", url)
            url = "http://gateway.invalid"
        url = url.replace("http:", "https:") if way == "https" else url
        with pytest.raises(NotTaken):
            Ostinato(url, deadline_s=0.2).feedback("R", "accepted", True)
        left = attempts()
        found.set()
        for attempt in left:
            attempt.join(PATIENT_S)
        assert (len(left), bodies) == (1, [])
        Ostinato(url, deadline_s=PATIENT_S).feedback("R", "accepted", True)
        assert len(bodies) == 1


def test_attempts_that_were_given_up_are_bounded(monkeypatch):
    found = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found.wait() and [])
    client = Ostinato("http://gateway.invalid", deadline_s=0.02)
    for _ in range(24):
        with pytest.raises(NotTaken) as caught:
            client.feedback("R", "accepted", True)
    left = attempts()
    assert len(left) <= 16
    assert "earlier attempts" in str(caught.value)
    found.set()
    for attempt in left:
        attempt.join(PATIENT_S)
    with answering([reply(202)]) as (url, _):
        monkeypatch.undo()
        client._sender._base = url + "/v1"
        client._deadline_s = PATIENT_S
        assert client.feedback("R", "accepted", True) == Receipt("e", "accepted")


def test_an_attempt_is_made_also_where_no_thread_can_be_started(monkeypatch):
    """From Python 3.12 on none can at a program's end, when what is left is sent."""
    start = threading.Thread.start

    def refused(thread):
        if thread.name == ATTEMPT:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with answering([reply(202)]) as (url, _):
        assert Ostinato(url, deadline_s=PATIENT_S).feedback("R", "accepted", True) == Receipt("e", "accepted")


async def test_a_call_that_waited_for_a_thread_has_waited():
    """Eight calls to a server that hangs must not have the ninth wait for their deadline and then for its own."""
    with answering([reply(202)]) as (url, bodies):
        async with AsyncOstinato(url, deadline_s=0.2) as client:
            hung = threading.Event()
            for _ in range(client._threads._max_workers):
                client._threads.submit(hung.wait)
            asked = asyncio.ensure_future(client.feedback("R", "accepted", True))
            await asyncio.sleep(0.3)
            hung.set()
            with pytest.raises(NotTaken, match="no attempt was made"):
                await asked
    assert not bodies


def test_by_default_a_dead_server_costs_five_seconds_at_most():
    with pytest.raises(NotTaken) as caught:
        Ostinato("http://127.0.0.1:9", deadline_s=0.2).feedback("R", "accepted", True)
    assert "same ids" in str(caught.value)
    assert Ostinato("http://127.0.0.1:9")._deadline_s == 5.0


def test_a_cut_answer_is_asked_for_again():
    cut = reply(202, b'{"id":"e"', length=1000)
    with answering([cut, reply(502), reply(429, retry_after="0"), reply(202)]) as (url, bodies):
        assert Ostinato(url).feedback("R", "accepted", True) == Receipt("e", "accepted")
    assert len(bodies) == 4
    assert len(set(bodies)) == 1, "the same event with the same id"


def test_an_error_that_is_nested_without_end_is_one_to_get_past():
    """Else what was enqueued would be dropped as if it were no JSON itself."""
    with answering([reply(503, b"[" * 100_000), reply(202)]) as (url, bodies):
        assert Ostinato(url, deadline_s=PATIENT_S).feedback("R", "accepted", True) == Receipt("e", "accepted")
    assert len(bodies) == 2


def test_a_key_is_never_sent_elsewhere():
    with answering([reply(202)]) as (elsewhere, bodies):
        for status in (301, 302, 307, 308):
            with answering([reply(status, location=elsewhere + "/v1/feedback")]) as (url, _), pytest.raises(Refused):
                Ostinato(url, KEY).feedback("R", "accepted", True)
        assert not bodies


def test_a_key_never_goes_through_a_proxy_without_tls(monkeypatch):
    seen = []

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self):
            self.send_response(200)
            self.end_headers()
            seen.append((self.path, self.connection.recv(65536)))
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.server_port}")
    for deadline_s in (1.0, 10.0, 60.0):  # a busy machine may need longer for several attempts of one call
        seen.clear()
        with pytest.raises(NotTaken):
            Ostinato("https://gateway.invalid", KEY, deadline_s=deadline_s).feedback("R", "accepted", True)
        if len(seen) >= 4:
            break
    server.shutdown()
    server.server_close()
    assert len(seen) >= 4
    assert {place for place, _ in seen} == {"gateway.invalid:443"}
    assert not [said for _, said in seen if said and not said.startswith(b"\x16")], "not the beginning of TLS"


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"{}", b"[]", b"3", b"null"])
def test_an_answer_that_is_no_gateways_is_asked_for_again(page):
    with answering([reply(200, page), reply(202)]) as (url, bodies):
        assert Ostinato(url, deadline_s=PATIENT_S).feedback("R", "accepted", True) == Receipt("e", "accepted")
    assert len(set(bodies)) == 1
    with answering([reply(200, page)]) as (url, _), pytest.raises(NotTaken, match="no gateway's"):
        Ostinato(url, deadline_s=0.3).feedback("R", "accepted", True)


def test_nothing_that_is_enqueued_ends_the_thread_that_sends(caplog):
    with answering([reply(200, b"<html>log in</html>"), reply(202)]) as (url, bodies):
        client = Ostinato(url, deadline_s=PATIENT_S)
        with caplog.at_level(logging.ERROR, "ostinato_client"):
            bad = client.enqueue("R", "accepted", object())
            assert client.flush(PATIENT_S)
        client.enqueue("R", "accepted", True)
        assert client.flush(PATIENT_S)
        assert len(bodies) == 2
        assert client.close()
    assert bad in caplog.text


def test_a_forked_process_sends_its_own_events():
    with answering([reply(202)]) as (url, bodies):
        code = f"""
import os
from ostinato_client import Ostinato
client = Ostinato({url!r}, deadline_s={PATIENT_S})
client.enqueue("R", "before", True)
assert client.flush({PATIENT_S})
if os.fork() == 0:
    client.enqueue("R", "after", True)
    os._exit(0 if client.close() else 3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
        subprocess.run(
            [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE)}, timeout=WHOLE_PROGRAM_S
        )
    assert [json.loads(body)["name"] for body in bodies] == ["before", "after"]


async def test_enqueued_events_are_sent_beside_the_program():
    log = MemoryLog(delay_s=0.05)
    async with serving(app(log)) as url:
        client = Ostinato(url, deadline_s=PATIENT_S)
        began = time.monotonic()
        # they hold up the loop that serves them, so one that waited would wait for its whole deadline
        ids = [client.enqueue("R", "accepted", True) for _ in range(50)]
        assert time.monotonic() - began < client._deadline_s
        assert await asyncio.to_thread(client.flush)
        assert [signal.id for signal in log.signals()] == ids
        assert await asyncio.to_thread(client.close)
        with pytest.raises(NotTaken, match="closed"):
            client.enqueue("R", "accepted", True)
    assert log.appends < 50


async def test_one_bad_event_does_not_take_its_neighbours_along(caplog):
    log = MemoryLog()
    async with serving(app(log)) as url:
        client = Ostinato(url)
        good = [client.enqueue("R", name, True) for name in ("accepted", "not a name", "undone")]
        with caplog.at_level(logging.ERROR, "ostinato_client"):
            assert await asyncio.to_thread(client.close)
    assert [signal.id for signal in log.signals()] == [good[0], good[2]]
    assert good[1] in caplog.text


def test_the_queue_is_bounded_and_what_was_not_sent_is_sent_later():
    background = Background(Sender("http://127.0.0.1:9", None), most=3)
    background._deadline_s = 0.05
    for _ in range(3):
        background.put(Event("R", "accepted", True))
    with pytest.raises(NotTaken, match="3 events wait"):
        background.put(Event("R", "accepted", True))
    assert not background.flush(0.2)
    with answering(
        [lambda handler: reply(202, b"[" + b",".join([b'{"id":"e","status":"early"}'] * 3) + b"]")(handler)]
    ) as (url, bodies):
        background._sender, background._deadline_s = Sender(url, None), PATIENT_S
        assert background.flush(2 * PATIENT_S)
        assert len(bodies) == 1
    assert background.close(0.1)


def test_a_programs_end_sends_what_is_left():
    with answering([reply(202)]) as (url, bodies):
        code = f"from ostinato_client import Ostinato; Ostinato({url!r}).enqueue('R', 'accepted', True)"
        subprocess.run(
            [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE)}, timeout=WHOLE_PROGRAM_S
        )
        assert len(bodies) == 1


def test_a_signature_is_pinned():
    assert sign_user("secret-0123456789", "Zoë", now=1000.0, lifetime_s=60.0) == (
        "1060.3f8dc0023236aec6645505734156dd4e3f38eb1e71e4596dc33be4d64258dbc5"
    )


def test_it_is_standard_library_and_python_3_9():
    allowed = set(sys.stdlib_module_names) | {"ostinato_client"}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed, path
            assert not isinstance(node, ast.Match), path
    code = "import sys, ostinato_client; print(*sorted(m for m in sys.modules if m.partition('.')[0] in ('ostinato', 'numpy', 'aiohttp')))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE)}, capture_output=True, text=True
    )
    assert found.stdout.strip() == ""


async def test_a_users_choice_is_recorded_and_told():
    log, secret = MemoryLog(), "the secret of acme"
    async with serving(app(log, f"acme:{KEY}", user_keys=(f"acme:{secret}",))) as url:
        async with AsyncOstinato(url, KEY) as client:
            assert await client.consent("ann") == "yes"
            assert await client.consent("ann", "never") == "never"
            assert await client.consent("ann") == "never"
            with pytest.raises(NotAllowed, match="signature"):
                await client.consent("ann", "yes")
            with pytest.raises(Refused, match="never, aggregate, adapt, yes") as caught:
                await client.consent("ann", "no")
            assert caught.value.field == "train"
        signature = sign_user(secret, "ann", now=1000.0)
        with Ostinato(url, KEY) as client:
            assert await asyncio.to_thread(client.consent, "ann", "yes", signature=signature) == "yes"
    assert [(row.tenant, row.user, row.level) for row in log.rows] == [("acme", "ann", "never"), ("acme", "ann", "yes")]


async def test_a_users_dials_are_shown_set_and_reset(tmp_path):
    log, secret, name = MemoryLog(), "the secret of acme", "陳 Jürgen"
    await log.append(SteeringBasis.of(BASIS, at=1.0))
    adaptation = DialAdaptation(log, cache_at(tmp_path), AdaptConfig(mode="dials", holdout=0.0))
    signature = sign_user(secret, name, now=1000.0)
    gateway = app(log, f"acme:{KEY}", user_keys=(f"acme:{secret}",), adaptation=adaptation)
    async with serving(gateway) as url:
        async with AsyncOstinato(url, KEY) as client:
            told = await client.set_dials(name, {"brief": 0.5, "lists": None}, signature=signature)
            assert (told["user"], [dial["set"] for dial in told["dials"]]) == (name, [0.5, None, None])
            assert await client.dials(name, signature=signature) == told
            with pytest.raises(NotAllowed, match="signature"):
                await client.dials(name)
            with pytest.raises(Refused, match="there is no dial 'loud'") as caught:
                await client.set_dials(name, {"loud": 1.0}, signature=signature)
            assert caught.value.field == "loud"
        with Ostinato(url, KEY) as client:
            told = await asyncio.to_thread(client.reset_dials, name, signature=signature)
            assert [dial["set"] for dial in told["dials"]] == [None] * 3
            assert await asyncio.to_thread(client.dials, name, signature=signature) == told
            told = await asyncio.to_thread(client.set_dials, name, {"you": -1}, signature=signature)
            assert told["dials"][2]["words"] == "less you, set by hand"
    async with serving(app(log, KEY)) as url, AsyncOstinato(url, KEY) as client:
        with pytest.raises(Refused, match=r"adapt\.mode"):  # at once, not after the deadline
            await client.dials("ann")


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret\n", "sk-secret\u2013", "sk\x00secret"])
def test_a_key_that_no_header_can_hold_is_refused_without_it(key):
    with pytest.raises(ValueError, match="API key") as caught:
        Ostinato("http://127.0.0.1:9", api_key=key)
    assert "secret" not in str(caught.value)
