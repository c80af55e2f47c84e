"""Keys of clients that lie in a file: who may read it, what stands in it, and that nothing is let in by a file that is not right."""

import asyncio
import os
from pathlib import Path

import pytest
from gateway_world import ADMIN, ASK, world
from pydantic import SecretStr
from tests.deadlines import PATIENT_S
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import BadConfig
from ostinato.serve import auth
from ostinato.serve.auth import Keyring, client_keys
from ostinato.serve.session_cookies import SessionCookies
from ostinato.testing.engine import FakeEngine

KEY, OTHER = "acme:0123456789abcdef", "bolt:fedcba9876543210"


@pytest.fixture
def written(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "keys"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    return write


def said(keys):
    return [key.get_secret_value() for key in keys]


def test_keys_of_the_file_come_after_those_of_the_configuration(written):
    assert said(client_keys([SecretStr(KEY)], written(f"\n  {OTHER} \n\n"))) == [KEY, OTHER]
    assert said(client_keys([SecretStr(KEY)], None)) == [KEY]


def test_the_file_is_read_anew_at_each_start(written):
    assert said(client_keys((), written(KEY))) == [KEY]
    assert said(client_keys((), written(OTHER))) == [OTHER]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666, 0o441])
def test_a_file_that_everybody_may_use_is_refused(written, mode):
    with pytest.raises(BadConfig, match=r"every user may access .*chmod o= ") as caught:
        client_keys((), written(KEY, mode))
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640])
def test_its_owner_and_group_may(written, mode):
    assert said(client_keys((), written(KEY, mode))) == [KEY]


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file_lets_nobody_in_rather_than_everybody(written, text):
    with pytest.raises(BadConfig, match="contains no key"):
        client_keys((), written(text))


def test_a_comment_is_no_key_and_a_line_with_a_space_is_refused_by_its_number(written):
    assert said(client_keys((), written(f"# production keys\n{KEY}\n#{OTHER}\n"))) == [KEY]
    with pytest.raises(BadConfig, match=r"line 2 of .* contains a space") as caught:
        client_keys((), written(f"{KEY}\nbolt: fedcba9876543210"))
    assert "fedcba9876543210" not in str(caught.value)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_key(written):
    assert said(client_keys((), written(KEY.encode("utf-8-sig")))) == [KEY]


def test_what_is_no_file_or_nobodys_home_is_named_and_holds_up_nothing(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BadConfig, match=r"serve\.api_keys_file: .*(is not a file|cannot be read)"):
            client_keys((), path)
    with pytest.raises(BadConfig, match=r"serve\.api_keys_file: .*write the whole path"):
        client_keys((), Path("~nobody-of-that-name/keys"))


def test_a_file_that_is_not_there_or_no_text_is_named(written, tmp_path):
    with pytest.raises(BadConfig, match=f"serve.api_keys_file: .*none cannot be read by user {os.getuid()}"):
        client_keys((), tmp_path / "none")
    with pytest.raises(BadConfig, match="UTF-8"):
        client_keys((), written(b"\xff\xfe"))


def test_a_weak_or_repeated_key_is_named_by_its_place_in_the_file(written):
    for text, why in ((f"{OTHER}\nshort", "key 2 is too weak.*16"), (f"{OTHER}\n{OTHER}", "key 2 repeats")):
        with pytest.raises(BadConfig, match=f"serve.api_keys_file, {why}"):
            Keyring(client_keys([SecretStr(KEY)], written(text)), (), 1)
    with pytest.raises(BadConfig, match=r"serve.api_keys\[0\]"):
        Keyring(client_keys([SecretStr("short")], written(KEY)), (), 1)


async def test_the_gateway_lets_in_who_has_a_key_of_the_file_and_nobody_else(written):
    async with world(api_keys_file=written(KEY)) as w:
        for key, status in ((KEY.partition(":")[2], 200), (OTHER.partition(":")[2], 401)):
            assert (await w.chat(headers=w.key(key)))[0] == status
        assert [turn.tenant for turn in w.log.turns()] == ["acme"]


LOOKED_S = 5.0
"""Within this a change of the file has its effect."""


async def status_of(w, entry):
    return (await w.chat(headers=w.key(entry.partition(":")[2])))[0]


async def until(w, entry, status):
    async with asyncio.timeout(LOOKED_S):
        while await status_of(w, entry) != status:
            await asyncio.sleep(0.05)


async def test_a_removed_key_opens_nothing_while_its_stream_goes_on(written):
    class Held(FakeEngine):
        go = asyncio.Event()

        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk
                await self.go.wait()

    engine = Held(lambda request: "hello again")
    async with world(engine=engine, real=True, api_keys=[OTHER], api_keys_file=written(KEY)) as w:
        headers = w.key(KEY.partition(":")[2])
        body = {**ASK, "stream": True}
        async with w.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
            assert stream.status_code == 200
            written("acme:another-0123456789")
            assert w.engine.running == 1
            async with asyncio.timeout(PATIENT_S):
                while (await w.get("/v1/models", headers))[0] != 401:
                    await asyncio.sleep(0.05)
            assert w.engine.running == 1
            engine.go.set()
            said = await stream.aread()
        assert said.endswith(b"data: [DONE]\n\n")
        assert [await status_of(w, each) for each in (KEY, "acme:another-0123456789", OTHER)] == [401, 200, 200]


@in_virtual_time
async def test_a_removed_key_opens_nothing_within_seconds(written):
    async with world(api_keys=[OTHER], api_keys_file=written(KEY)) as w:
        assert await status_of(w, KEY) == 200
        written("acme:another-0123456789")
        await until(w, KEY, 401)


@in_virtual_time
async def test_a_removed_key_opens_nothing_although_the_file_could_not_be_read_at_first(written, monkeypatch):
    async with world(api_keys=[OTHER], api_keys_file=written(KEY)) as w:
        read, failed = auth._read_keys, []

        def crowded(file):
            if not failed:
                failed.append(file)
                raise BadConfig("serve.api_keys_file: Too many open files")
            return read(file)

        monkeypatch.setattr(auth, "_read_keys", crowded)
        written("acme:another-0123456789")
        await until(w, KEY, 401)
        assert failed


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("", 0o600, "contains no key"),
        ("acme:short", 0o600, "too weak"),
        (f"{OTHER}\n{OTHER}", 0o600, "repeats"),
        (OTHER, 0o644, "every user may access"),
    ],
)
@in_virtual_time
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(written, caplog, text, mode, why):
    async with world(api_keys_file=written(KEY)) as w:
        written(text, mode)
        async with asyncio.timeout(LOOKED_S):
            while why not in caplog.text:
                await asyncio.sleep(0.05)
        assert [await status_of(w, each) for each in (KEY, OTHER)] == [200, 401]
        assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
        assert OTHER.partition(":")[2] not in caplog.text
        written(f"{KEY}\nacme:another-0123456789")
        await until(w, "acme:another-0123456789", 200)


@in_virtual_time
async def test_a_file_that_is_gone_changes_nothing(written, caplog):
    path = written(KEY)
    async with world(api_keys_file=path) as w:
        path.unlink()
        async with asyncio.timeout(LOOKED_S):
            while "cannot be read" not in caplog.text:
                await asyncio.sleep(0.05)
        assert await status_of(w, KEY) == 200


@in_virtual_time
async def test_keys_of_new_tenants_wait_for_a_restart_and_the_log_says_so(written, caplog):
    async with world(api_keys_file=written(KEY)) as w:
        written(f"{OTHER}\n")  # none but new ones: that must not open the gateway to everybody
        await until(w, KEY, 401)
        assert await status_of(w, OTHER) == 401
        assert (await w.chat())[0] == 401
        assert "new tenants (bolt) are refused until the gateway is restarted" in caplog.text


async def test_the_pages_cookies_end_with_their_keys(written):
    now = 1000.0
    own = [SecretStr(ADMIN)]
    keys = Keyring([SecretStr(KEY), SecretStr(OTHER)], own)
    visits = SessionCookies(keys, [SecretStr(KEY), SecretStr(OTHER)], own, lambda: now)
    cookie = visits.cookie(OTHER.partition(":")[2])
    headers = {b"cookie": f"ostinato={cookie}".encode()}
    assert visits.visitor(headers).tenant == "bolt"
    keys.renew([SecretStr(KEY)])
    assert visits.visitor(headers) is None, "between the two as well"
    visits.renew([SecretStr(KEY)])
    assert visits.visitor(headers) is None
    assert visits.cookie(OTHER.partition(":")[2]) is None
    assert visits.cookie(ADMIN) is not None
