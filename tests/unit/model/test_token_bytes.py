import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ostinato.model.renderer import HFRenderer, TokenBytes
from ostinato.testing.tiny import tiny_model

TEXT = "naïve 🙂 end\n"


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def byte_fallback():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("\u2581", "n", "a", "v", "e", "d", "ï"):
        vocab[piece] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(make):
    core = make()
    ids = core.encode(TEXT).ids
    parts = [TokenBytes(core).of(id) for id in ids]
    assert b"".join(parts) == TEXT.encode()
    assert [part for part in parts if len(part) == 1 and part[0] >= 0xF0], "an emoji must have been split"


def test_a_tokenizer_without_bytes_gives_what_it_decodes():
    core = Tokenizer(models.WordLevel(vocab={"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert TokenBytes(core).of(0) == b"hello"
    assert TokenBytes(core).of(99) == b""


def test_a_control_token_has_no_bytes(tmp_path):
    renderer = HFRenderer(tiny_model(tmp_path / "tiny"))
    (stop,) = renderer.stop_ids()
    assert renderer.token_bytes(stop) == b""
    assert b"".join(map(renderer.token_bytes, renderer.encode("é"))) == "é".encode()
