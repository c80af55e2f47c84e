"""Keys of clients that lie in a file: who may read it, what stands in it, and that nothing is let in by a file that is not right."""

import os
from pathlib import Path

import pytest
from gateway_world import world
from pydantic import SecretStr

from ostinato.core.errors import BadConfig
from ostinato.serve.auth import Keyring, client_keys

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
    with pytest.raises(BadConfig, match=r"everybody may use .*chmod o= ") as caught:
        client_keys((), written(KEY, mode))
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640])
def test_its_owner_and_group_may(written, mode):
    assert said(client_keys((), written(KEY, mode))) == [KEY]


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file_lets_nobody_in_rather_than_everybody(written, text):
    with pytest.raises(BadConfig, match="holds no key"):
        client_keys((), written(text))


def test_a_comment_is_no_key_and_a_line_with_a_space_is_refused_by_its_number(written):
    assert said(client_keys((), written(f"# production keys\n{KEY}\n#{OTHER}\n"))) == [KEY]
    with pytest.raises(BadConfig, match=r"line 2 of .* holds a space") as caught:
        client_keys((), written(f"{KEY}\nbolt: fedcba9876543210"))
    assert "fedcba9876543210" not in str(caught.value)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_key(written):
    assert said(client_keys((), written(KEY.encode("utf-8-sig")))) == [KEY]


def test_what_is_no_file_or_nobodys_home_is_named_and_holds_up_nothing(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BadConfig, match=r"serve\.api_keys_file: .*(is no file|cannot be read)"):
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
