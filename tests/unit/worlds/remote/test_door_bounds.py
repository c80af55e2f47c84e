"""What one worker, or somebody without a certificate, can take of the door: connections, handshakes, bodies; and who is shut out."""

import asyncio
import contextlib
import json
import logging
import ssl
import threading
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from tests.deadlines import PATIENT_S
from tests.fakes.certificates import Authority
from tests.unit.worlds.remote.test_door import CHAT, OWN, site

from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.rollout import mutual_tls, rollout_server
from ostinato.worlds.rollout.mutual_tls import RefusedSerials, renewing, worker_context


def port_of(at):
    return int(at.url.rpartition(":")[2])


def papers(at, name):
    signed = at.authority.sign(name)
    return signed, worker_context(signed.certificate, signed.key, at.authority.file)


async def health(at, context):
    async with WorldGateway(at.url, "", timeout_s=PATIENT_S, context=context) as gateway:
        return (await at.says(gateway, "GET", "/health"))[0]


async def closes(reader):
    """True once the other side has closed the connection."""
    async with asyncio.timeout(PATIENT_S):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            return await reader.read(1) == b""
    return True


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (b"[" * 65 + b"]" * 65, 400, "deeper than 64"),
        (json.dumps(CHAT | {"stop": ["x"] * 100_000}).encode(), 413, "more than 100000 values"),
        (json.dumps(CHAT | {"metadata": {str(n): 1 for n in range(40_001)}}).encode(), 413, "more than 40000 fields"),
        (b"[" + b" " * 70_000 + b"9" * 200 + b"]", 400, "too many digits"),
        (b"{", 400, "must be JSON"),
        (b"[NaN]", 400, "must be JSON"),
    ],
)
async def test_a_body_is_bounded_before_it_is_built(tmp_path, text, status, words):
    async with site(tmp_path) as at, at.worker() as gateway:
        for path in ("/v1/chat/completions", "/v1/feedback"):
            found, said = await at.says(gateway, "POST", path, text, OWN)
            assert (found, words in said) == (status, True), said
    assert at.log.turns() == []


async def test_a_long_body_is_read_off_the_loop(tmp_path, monkeypatch):
    parsed, threads = rollout_server._parsed, []

    def noted(data):
        threads.append(threading.current_thread() is threading.main_thread())
        return parsed(data)

    monkeypatch.setattr(rollout_server, "_parsed", noted)
    long = CHAT | {"messages": [{"role": "user", "content": "x" * 70_000}]}
    async with site(tmp_path) as at, at.worker() as gateway:
        for body in (CHAT, long):
            await at.says(gateway, "POST", "/v1/chat/completions", body, OWN)
    assert threads == [True, False]


async def test_idle_connections_of_one_name_leave_room_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_server, "CONNECTIONS", 9)
    async with site(tmp_path, connections=4) as at:
        _, acme = papers(at, "acme")
        held = [await asyncio.open_connection("127.0.0.1", port_of(at), ssl=acme) for _ in range(12)]
        ends = [asyncio.ensure_future(closes(reader)) for reader, _ in held]
        async with asyncio.timeout(PATIENT_S):
            while sum(end.done() for end in ends) < 8:
                await asyncio.sleep(0.02)
        done, idle = await asyncio.wait(ends, timeout=0.2)
        assert (len(done), len(idle)) == (8, 4)
        assert await health(at, papers(at, "eve")[1]) == 200
        for end in idle:
            end.cancel()
        for _, writer in held:
            writer.transport.abort()
        async with asyncio.timeout(PATIENT_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if await health(at, acme) == 200:
                        break
                await asyncio.sleep(0.02)


async def test_who_never_ends_a_handshake_keeps_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_server, "HANDSHAKES", 4)
    async with site(tmp_path) as at:
        silent = [await asyncio.open_connection("127.0.0.1", port_of(at)) for _ in range(20)]
        assert await health(at, papers(at, "acme")[1]) == 200
        for reader, _ in silent[:16]:
            assert await closes(reader), "the oldest handshakes gave way"
        for _, writer in silent:
            writer.transport.abort()


async def test_a_handshake_has_a_deadline_and_a_failed_one_is_forgotten(tmp_path, monkeypatch):
    made = []
    arrivals = rollout_server.Arrivals
    monkeypatch.setattr(
        rollout_server, "Arrivals", lambda *words, **more: made.append(arrivals(*words, **more)) or made[0]
    )
    async with site(tmp_path) as at:
        with monkeypatch.context() as hasty:
            hasty.setattr(rollout_server, "HANDSHAKE_S", 0.2)
            reader, silent = await asyncio.open_connection("127.0.0.1", port_of(at))
            assert await closes(reader)
        silent.close()
        reader, wrong = await asyncio.open_connection("127.0.0.1", port_of(at))
        wrong.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        await closes(reader)
        wrong.transport.abort()
        async with asyncio.timeout(PATIENT_S):
            while made[0]._handshakes:
                await asyncio.sleep(0.01)
        assert await health(at, papers(at, "acme")[1]) == 200


async def test_a_certificate_is_refused_without_a_restart(tmp_path):
    listed = tmp_path / "refused.txt"
    listed.write_text("# none yet\n")
    async with site(tmp_path, refused=str(listed)) as at:
        lost, context = papers(at, "acme")
        _, renewed = papers(at, "acme")
        serial = x509.load_pem_x509_certificate(Path(lost.certificate).read_bytes()).serial_number
        async with WorldGateway(at.url, "", timeout_s=PATIENT_S, context=context) as gateway:
            assert (await at.says(gateway, "GET", "/health"))[0] == 200
            listed.write_text(f"serial=00{serial:X}  # stolen\n")
            async with asyncio.timeout(PATIENT_S):
                while (answer := await at.says(gateway, "GET", "/health"))[0] == 200:
                    await asyncio.sleep(0.05)
            assert (answer[0], "worlds.door.refused" in answer[1]) == (401, True), "a connection that was open before"
        with pytest.raises(aiohttp.ClientError):
            await health(at, context)
        assert await health(at, renewed) == 200, "the same name, under another certificate"


@pytest.mark.parametrize("side", ["door", "worker"])
async def test_a_certificate_that_ran_out_is_renewed_without_a_restart(tmp_path, side):
    async with site(tmp_path, days=-1 if side == "door" else 1) as at:
        signed = at.authority.sign("acme", days=-1 if side == "worker" else 1)
        context = worker_context(signed.certificate, signed.key, at.authority.file)
        old, own = (at.signed, at.context) if side == "door" else (signed, context)
        async with renewing(own, old.certificate, old.key, look_s=0.01):
            with pytest.raises(aiohttp.ClientError):
                await health(at, context)
            new = at.authority.sign("acme")
            Path(new.certificate).replace(old.certificate)
            Path(new.key).replace(old.key)
            async with asyncio.timeout(PATIENT_S):
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        assert await health(at, context) == 200
                        break
                    await asyncio.sleep(0.01)


async def test_a_certificate_whose_key_is_still_to_come_changes_nothing(tmp_path, caplog):
    async def told(words):
        async with asyncio.timeout(PATIENT_S):
            while words not in caplog.text:
                await asyncio.sleep(0.01)

    caplog.set_level(logging.INFO)
    async with site(tmp_path) as at:
        signed, context = papers(at, "acme")
        new, _ = papers(at, "acme")
        async with renewing(context, signed.certificate, signed.key, look_s=0.01):
            Path(new.certificate).replace(signed.certificate)
            await told("the old certificate stays in use")
            assert await health(at, context) == 200, "with the old certificate"
            Path(new.key).replace(signed.key)
            await told("is used from now on")
            assert await health(at, context) == 200


async def test_a_pair_that_could_not_be_read_at_first_is_read_again(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    signed, new = (Authority(tmp_path).sign("acme") for _ in range(2))
    context, tries = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), []

    class Crowded(ssl.SSLContext):
        """Cannot read the key the first three times."""

        def load_cert_chain(self, *files):
            tries.append(files)
            if len(tries) <= 3:
                raise PermissionError("the key is not yet this user's")
            super().load_cert_chain(*files)

    async with renewing(context, signed.certificate, signed.key, look_s=0.01):
        monkeypatch.setattr(mutual_tls.ssl, "SSLContext", Crowded)
        Path(new.key).replace(signed.key)
        Path(new.certificate).replace(signed.certificate)
        async with asyncio.timeout(PATIENT_S):
            while "is used from now on" not in caplog.text:
                await asyncio.sleep(0.01)
    assert len(tries) == 4
    assert caplog.text.count("not yet this user's") == 1


async def test_a_list_that_cannot_be_read_changes_nothing(tmp_path, caplog):
    listed = tmp_path / "refused.txt"
    listed.write_text("0a:1B\n\n")
    refused = RefusedSerials(str(listed))
    assert all(serial in refused for serial in ("A1B", "0A1B", "0a1b"))
    assert "" not in refused
    watching = asyncio.ensure_future(refused.watch(look_s=0.01))
    listed.write_text("fine\n")
    async with asyncio.timeout(PATIENT_S):
        while "stays as it was" not in caplog.text:
            await asyncio.sleep(0.01)
    assert "0A1B" in refused
    watching.cancel()
    with pytest.raises(BadConfig, match=r"line 1 of .* is no serial number"):
        RefusedSerials(str(listed))
    with pytest.raises(BadConfig, match="cannot be read"):
        RefusedSerials(str(tmp_path / "missing"))
    assert "1" not in RefusedSerials()


async def test_a_list_that_could_not_be_read_at_first_is_read_again(tmp_path, monkeypatch):
    listed = tmp_path / "refused.txt"
    listed.write_text("0a:1B\n")
    refused, failed = RefusedSerials(str(listed)), []
    read = refused._read

    def crowded():
        if not failed:
            failed.append(1)
            raise BadConfig("worlds.door.refused: Too many open files")
        return read()

    monkeypatch.setattr(refused, "_read", crowded)
    watching = asyncio.ensure_future(refused.watch(look_s=0.01))
    listed.write_text("serial=02c7  # stolen\n")
    async with asyncio.timeout(PATIENT_S):
        while "2C7" not in refused:
            await asyncio.sleep(0.01)
    assert failed
    watching.cancel()
