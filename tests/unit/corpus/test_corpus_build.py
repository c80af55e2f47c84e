"""A corpus is the same for the same sources, keeps to its bounds, and is refused if anything of it was changed."""

import json
import re
import resource
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ostinato.core.errors import BadConfig, BadRequest, Corrupt, NotFound, StorageFull
from ostinato.corpus import build as module
from ostinato.corpus.build import CorpusBuild
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.filters import OverlapIndex
from ostinato.corpus.order import Phase, held_out
from ostinato.corpus.shards import MANIFEST, CorpusReader, ShardSet, read_manifest
from ostinato.corpus.sources import SourceFiles, archive_source, directory_source, stdlib_source


def a_file(number):
    words = " ".join(f"name{number}of{n}" for n in range(60))
    return f"def f{number}(x):\n    return '{words}'\n"


def files(count, first=0):
    return [(f"m{n}.py", a_file(n).encode()) for n in range(first, first + count)]


def build(out, *sources, config=None, tested=None):
    made = CorpusBuild(
        config or CorpusConfig(shard_tokens=4096), tested or OverlapIndex(13, 8), lambda t: list(t.encode()), 256
    )
    for source in sources:
        made.take(source, lambda: None)
    return made.write(out, tokenizer="0" * 64, vocabulary=257, against={})


def source(name, inside, *, permissive=True, licence="MIT"):
    files = [(path, lambda most, data=data: data[:most]) for path, data in inside]
    return SourceFiles(name=name, licence=licence, permissive=permissive, files=files)


@pytest.fixture
def corpus(tmp_path):
    build(tmp_path / "corpus", source("one", files(20)))
    return tmp_path / "corpus"


def test_every_file_is_there_once_between_separators(corpus):
    shards = ShardSet(corpus)
    assert len(shards.manifest.shards) > 1, "the test wants several shards"
    read = set()
    for document, size in enumerate(shards.sizes_D.tolist()):
        tokens = shards.tokens(document, 0, size)
        assert tokens[0] == tokens[-1] == 256
        read.add(bytes(tokens[1:-1].astype(np.uint8)))
    assert read == {data for _, data in files(20)}
    assert sum(shards.sizes_D) == shards.manifest.tokens


def test_no_more_than_a_shard_is_held(corpus):
    shards = ShardSet(corpus)
    for document in range(len(shards.sizes_D)):
        shards.tokens(document, 0, 1)
        assert len(shards._tokens) == shards.manifest.shards[shards.shards_D[document]].tokens


def test_the_same_sources_give_the_same_bytes_and_their_order_decides_only_which_copy_stays(tmp_path):
    one, two = source("one", files(10)), source("two", files(10, first=10))
    first, again, turned = (tmp_path / name for name in ("a", "b", "c"))
    build(first, one, two)
    build(again, one, two)
    build(turned, two, one)
    for name in sorted(path.name for path in first.iterdir()):
        assert (first / name).read_bytes() == (again / name).read_bytes()
        if name != MANIFEST:
            assert (first / name).read_bytes() == (turned / name).read_bytes()


def test_what_is_left_out_is_counted_and_what_matters_is_listed(tmp_path):
    tested = OverlapIndex(13, 8)
    tested.add("suite.jsonl", [a_file(3)])
    inside = [*files(6), ("copy.py", a_file(1).encode()), ("tiny.py", b"x"), ("data.bin", b"\0" * 100)]
    made = build(
        tmp_path / "c",
        source("one", inside),
        source("gnu", files(2, 90), permissive=False, licence="GPL-3.0-only"),
        tested=tested,
    )
    assert made.left_out == {"copy": 1, "licence": 1, "size": 1, "tested": 1}
    assert [(each.source, each.path, each.reason) for each in made.refused] == [
        ("one", "m3.py", "tested"),
        ("gnu", "", "licence"),
    ]
    assert made.refused[1].detail == "GPL-3.0-only"
    assert made.documents == 5
    assert [share.documents for share in made.sources] == [5]


def test_nothing_is_written_where_nothing_is_left_or_something_lies(tmp_path, corpus):
    with pytest.raises(BadRequest, match="no file is left"):
        build(tmp_path / "none", source("gnu", files(2), permissive=False))
    assert not (tmp_path / "none").exists()
    with pytest.raises(BadConfig, match="not empty"):
        build(corpus, source("one", files(2)))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"], "and no half of it stays"


def test_of_a_large_file_no_more_is_read_than_shows_that_it_is_large(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("weights.bin", "log.txt"):
        with (tmp_path / "mine" / name).open("wb") as file:
            file.truncate(1 << 40)  # a hole: a TiB that takes no space
    (tmp_path / "mine" / "a.py").write_bytes(files(1)[0][1])
    made = build(tmp_path / "c", directory_source(tmp_path / "mine"))
    assert (made.documents, made.left_out) == (1, {"size": 1})


def test_a_file_that_cannot_be_read_is_counted(tmp_path):
    def refused(most):
        raise PermissionError("no")

    one = source("one", files(1))
    made = build(tmp_path / "c", replace(one, files=[*one.files, ("b.py", refused)]))
    assert (made.documents, made.left_out) == (1, {"unreadable": 1})


def test_a_file_that_goes_while_the_build_runs_is_counted(tmp_path):
    for name, data in files(2):
        (tmp_path / name).write_bytes(data)
    made = CorpusBuild(CorpusConfig(near=1.0), OverlapIndex(13, 8), lambda text: [1], 0)
    made.take(directory_source(tmp_path), lambda: (tmp_path / "m1.py").unlink(missing_ok=True))
    assert (made.tokens, dict(made.left_out)) == (3, {"unreadable": 1})


def test_what_a_killed_build_left_is_removed(tmp_path):
    for name in (".corpus.partial", ".corpus.partial-ab1_"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-00009.safetensors").write_bytes(b"half")
    build(tmp_path / "corpus", source("s", files(3)))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    assert not (tmp_path / "corpus" / "shard-00009.safetensors").exists()


def test_of_two_builds_to_one_place_each_keeps_to_its_own_files(tmp_path, monkeypatch):
    out, writing = tmp_path / "corpus", module.write_shards

    def write_shards(documents, partial, tokens):
        monkeypatch.setattr(module, "write_shards", writing)
        shards = writing(documents, partial, tokens)
        build(out, source("s", files(3)))
        return shards

    monkeypatch.setattr(module, "write_shards", write_shards)
    with pytest.raises(BadConfig, match="corpus is not empty"):
        build(out, source("s", files(40)))
    assert ShardSet(out).manifest.documents == 3
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_path_that_is_no_text_can_be_written_down(tmp_path):
    tested = OverlapIndex(13, 8)
    tested.add("suite", [a_file(3)])
    made = build(tmp_path / "c", source("one", [*files(2), ("m\udcff.py", a_file(3).encode())]), tested=tested)
    assert [each.path for each in made.refused] == ["m?.py"]
    assert read_manifest(tmp_path / "c") == made


def test_a_full_disk_is_named_and_nothing_half_written_stays(tmp_path):
    made = CorpusBuild(CorpusConfig(), OverlapIndex(13, 8), lambda t: list(t.encode()), 256)
    made.take(source("one", files(200)), lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        with pytest.raises(StorageFull, match="free some space"):
            made.write(tmp_path / "c", tokenizer="0" * 64, vocabulary=257, against={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    made.write(tmp_path / "c", tokenizer="0" * 64, vocabulary=257, against={})


def test_what_is_measured_is_of_many_files_and_the_same_for_every_seed(tmp_path):
    build(tmp_path / "c", source("one", files(20)), config=CorpusConfig())

    def held(seed, predictions):
        reader = CorpusReader(
            [ShardSet(tmp_path / "c")], [1.0], [Phase(length=128)], batch_tokens=128, steps=4, share=0.4, seed=seed
        )
        return reader.held_out(predictions)

    every = held(0, 1 << 20)
    assert len({bytes(np.array(piece, np.int32)) for piece in every}) == len(every)
    few = held(0, 1024)
    assert few == held(1, 1024)
    assert sum(len(piece) - 1 for piece in few) == 1024
    names = {name for piece in few for name in re.findall(r"name\d+of", bytes(t for t in piece if t < 256).decode())}
    assert len(names) >= 4, "one after the other, two would fill it"


def test_epochs_are_those_of_the_corpus_that_is_read_most(corpus, tmp_path):
    build(tmp_path / "small", source("two", files(9, first=50)))
    sets = [ShardSet(corpus), ShardSet(tmp_path / "small")]
    reader = CorpusReader(sets, [1.0, 1.0], [Phase(length=128)], batch_tokens=256, steps=4, share=0.4, seed=0)
    read = sum(
        int(size) - 1
        for size, apart in zip(sets[1].sizes_D, held_out(sets[1].digests_D, 0.4), strict=True)
        if not apart
    )
    assert reader.epochs(4 * read) == pytest.approx(2.0)


def changed(corpus, change):
    body = json.loads((corpus / MANIFEST).read_text())
    change(body)
    (corpus / MANIFEST).write_text(json.dumps(body))


@pytest.mark.parametrize(
    "name", ["../shard-00000.safetensors", "/etc/passwd", "shard-00000.bin", "shard-00000.safetensors\n", ""]
)
def test_a_manifest_names_no_other_file_than_a_shard(corpus, name):
    changed(corpus, lambda body: body["shards"][0].update(file=name))
    with pytest.raises(Corrupt, match="build the corpus again"):
        ShardSet(corpus)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(tokens=body["tokens"] + 1),
        lambda body: body["shards"].append(body["shards"][0]),
        lambda body: body.update(format="ostinato-corpus@2"),
        lambda body: body.update(more=1),
        lambda body: body["shards"][0].update(bytes=7),
        lambda body: body["shards"][0].update(blake3="0" * 64),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(corpus, change):
    changed(corpus, change)
    with pytest.raises(Corrupt):
        ShardSet(corpus)


def test_a_changed_byte_a_link_and_a_missing_shard_are_refused(corpus, tmp_path):
    shard = corpus / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Corrupt, match="size or hash differs"):
        ShardSet(corpus)
    shard.unlink()
    with pytest.raises(Corrupt, match="missing"):
        ShardSet(corpus)
    data[-1] ^= 1
    (tmp_path / "elsewhere").write_bytes(data)
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupt, match="plain file"):
        ShardSet(corpus)


@pytest.mark.parametrize("damage", ["token", "offsets", "dtype", "no dtype of numpy's"])
def test_a_shard_with_the_right_hash_and_a_wrong_form_is_refused(corpus, damage):
    from blake3 import blake3

    path = corpus / "shard-00000.safetensors"
    arrays = load_file(path)
    if damage == "token":
        arrays["tokens"][5] = 257
    elif damage == "offsets":
        arrays["offsets"][1] = 0
    elif damage == "dtype":
        arrays["digests"] = arrays["digests"].astype(np.float64)
    save_file(arrays, path)
    if damage == "no dtype of numpy's":
        size, data = len(arrays["tokens"]), path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["tokens"] |= {"dtype": "BF16", "shape": [2 * size]}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    hashed = blake3(path.read_bytes()).hexdigest()
    changed(corpus, lambda body: body["shards"][0].update(blake3=hashed, bytes=path.stat().st_size))
    with pytest.raises(Corrupt):
        ShardSet(corpus)


def test_no_corpus(tmp_path):
    with pytest.raises(NotFound, match="corpus build"):
        ShardSet(tmp_path)


# ---------------------------------------------------------------- sources


def test_a_directory_is_walked_in_order_and_no_link_is_followed(tmp_path):
    root = tmp_path / "mine"
    for name in ("b.py", "a/x.py", ".git/c.py", "_vendor/d.py", "site-packages/e.py", "x.egg-info/f.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    (tmp_path / "secret.py").write_text("secret\n")
    (root / "link.py").symlink_to(tmp_path / "secret.py")
    (root / "up").symlink_to(tmp_path)
    found = directory_source(root)
    assert [path for path, _ in found.files] == ["b.py", "a/x.py"]
    assert (found.licence, found.permissive) == ("own", True)
    (root / "pyproject.toml").write_text('[project]\nlicense = "GPL-3.0-only"\n')
    assert not directory_source(root).permissive
    for strange in ("project = 3\n", "[project]\nclassifiers = 5\n", f"a = {'[' * 50_000}\n"):
        (root / "pyproject.toml").write_text(strange)
        assert not directory_source(root).permissive
    (root / "pyproject.toml").write_text('[project]\nlicense = {text = "MIT"}\n')
    assert directory_source(root).permissive
    (root / "PKG-INFO").write_text("Name: mine\nLicense-Expression: LGPL-2.1-only\n\nLicense-Expression: MIT\n")
    assert not directory_source(root).permissive, "the description's text is not metadata"


def test_an_archive_is_judged_by_its_metadata():
    inside = {
        "PKG-INFO": b"Name: thing\nVersion: 1.0\nLicense-Expression: MIT\n",
        "thing.py": b"x",
        "_vendor/y.py": b"y",
    }
    found = archive_source(inside, "thing-1.0.tar.gz", "ab")
    assert (found.name, found.licence, found.permissive, found.sha256) == ("thing-1.0", "MIT", True, "ab")
    assert [path for path, _ in found.files] == ["PKG-INFO", "thing.py"]
    with pytest.raises(BadRequest, match="PKG-INFO"):
        archive_source({"thing.py": b"x"}, "thing-1.0.tar.gz", "")


def test_the_standard_library_is_found_without_its_tests():
    paths = [path for path, _ in stdlib_source().files]
    assert "json/decoder.py" in paths
    assert not [path for path in paths if "test" in path.split("/")[:-1] or "site-packages" in path]
