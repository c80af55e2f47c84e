"""A taskset file is read strictly: every error names the line and the field, and no path in it leads anywhere else."""

import json
import os

import pytest
from tests.fakes.tasks import WRONG, calc_task

from ostinato.core.errors import BadConfig
from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.tasks import tasksets
from ostinato.worlds.tasks.places import check_inside, read_tree
from ostinato.worlds.tasks.rows import unrepeated
from ostinato.worlds.tasks.task import KnownAnswer
from ostinato.worlds.tasks.tasksets import load, save, taskset_of

LINE = {
    "id": "calc-1",
    "family": "repair",
    "messages": [{"role": "user", "content": "Mend it."}],
    "grading": {"grader": "pytest", "hidden": {"test_calc.py": "x"}},
    "world": {"files": {"calc.py": WRONG.decode()}},
}


def written(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def changed(place, value):
    line = json.loads(json.dumps(LINE))
    *way, last = place.split("/")
    holder = line
    for step in way:
        holder = holder.setdefault(step, {})
    holder[last] = value
    return line


def test_a_line_gives_its_task(tmp_path):
    (task,) = load(written(tmp_path / "calc.jsonl", LINE, "  ")).tasks
    assert task.spec.files == {"calc.py": WRONG}
    assert task.grading.hidden == {"test_calc.py": b"x"}
    assert (task.harness, task.turns, task.stop) == ("single", 1, ())


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("colour", 1, "colour"),
        ("id", "", "id"),
        ("id", 7, "id"),
        ("split", "test", "split"),
        ("turns", 0, "turns"),
        ("turns", "3", "turns"),
        ("timeout_s", -1.0, "timeout_s"),
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": ""}], "messages.0.role"),
        ("messages", [{"role": "tool", "content": ""}], "messages"),
        ("messages", [{"role": "user", "content": "", "reasoning": "x"}], "messages"),
        ("world/workdir", "work", "world.workdir"),
        ("world/workdir", "/a/../etc", "world.workdir"),
        ("world/hosts", ["pypi.org"], "world.hosts"),
        ("world/hosts", ["pypi.org:99999"], "world.hosts"),
        ("world/env", {"A=B": "x"}, "world.env"),
        ("world/files", {"a": {"base64": "?"}}, "world.files.a"),
        ("world/files", {"a": 1}, "world.files.a"),
        ("world/files", {"a": "", "a/b": ""}, "world.files"),
        ("grading/hidden", {"../t.py": ""}, "grading.hidden"),
        ("grading/secret", 1, "grading.secret"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path, place, value, named):
    path = written(tmp_path / "bad.jsonl", LINE, changed(place, value))
    with pytest.raises(BadConfig, match=rf"taskset 'bad', line 2, field '{named}"):
        load(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("7", "not a JSON object"),
        ('{"id": NaN}', "NaN is not JSON"),
        ('{"id": 1e999}', "too large for a float"),
        ('{"id": "a", "id": "b"}', "'id' occurs twice"),
        ('{"id": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        (json.dumps(LINE).replace("Mend it.", "\\ud800"), "line 1"),
    ],
)
def test_what_is_no_task_is_named_with_its_line(tmp_path, line, said):
    with pytest.raises(BadConfig, match=r"line 1") as caught:
        load(written(tmp_path / "bad.jsonl", line))
    assert said in str(caught.value)


class Counted(str):
    """A key that counts how often it is compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


def test_a_key_that_stands_twice_is_found_in_one_pass(monkeypatch):
    monkeypatch.setattr(Counted, "compared", 0)
    keys = [f"key-{number}" for number in range(5_000)]
    with pytest.raises(ValueError, match="'key-4999' occurs twice"):
        unrepeated([(Counted(key), None) for key in [*keys, keys[-1]]])
    assert Counted.compared < 5_000


PATHS = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    ".",
    "./a",
    "a//b",
    "a/",
    "",
    "a\0b",
    "a\nb",
    "..\\x",
    "C:\\x",
    "x" * 300,
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", ["world/files", "grading/hidden"])
def test_a_path_that_leaves_is_refused(tmp_path, path, place):
    with pytest.raises(BadConfig, match=place.replace("/", ".")):
        load(written(tmp_path / "bad.jsonl", changed(place, {path: "x"})))


@pytest.mark.parametrize("path", ["a", "a/b.py", ".hidden", "a..b", "a b/ä"])
def test_a_path_that_stays_is_taken(path):
    assert check_inside(path) == path


@pytest.mark.parametrize("layer", ["/etc", "..", "../beside", "gone", "file", "out", "."])
def test_a_layer_lies_below_the_file(tmp_path, layer):
    (tmp_path / "beside").mkdir()
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").write_text("")
    (home / "out").symlink_to("/etc")
    with pytest.raises(BadConfig, match=r"line 1, field 'world.layers"):
        load(written(home / "bad.jsonl", changed("world/layers", [layer])))


def layered(tmp_path, text="x = 1\n"):
    (tmp_path / "layers" / "calc").mkdir(parents=True, exist_ok=True)
    (tmp_path / "layers" / "calc" / "calc.py").write_text(text)
    return written(tmp_path / "l.jsonl", changed("world/layers", ["layers/calc"]))


def test_the_hash_sees_what_lies_in_a_layer_and_not_where(tmp_path):
    first = load(layered(tmp_path / "a"))
    assert first.tasks[0].spec.layers == (str((tmp_path / "a" / "layers" / "calc").resolve()),)
    assert load(layered(tmp_path / "b")).hash == first.hash
    assert load(layered(tmp_path / "b", "x = 2\n")).hash != first.hash
    save(first, tmp_path / "a" / "again.jsonl")
    assert load(tmp_path / "a" / "again.jsonl").hash == first.hash
    with pytest.raises(BadConfig, match="is not below"):
        save(first, tmp_path / "b" / "again.jsonl")


def test_a_tree_is_its_names_contents_links_and_x_bits(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "l").symlink_to("/etc/passwd")
    hashes = [read_tree(tmp_path).hash]
    (tmp_path / "a").chmod(0o755)
    hashes.append(read_tree(tmp_path).hash)
    (tmp_path / "l").unlink()
    (tmp_path / "l").symlink_to("/etc/shadow")
    hashes.append(read_tree(tmp_path).hash)
    (tmp_path / "a").rename(tmp_path / "b")
    hashes.append(read_tree(tmp_path).hash)
    assert len(set(hashes)) == 4
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadConfig, match="pipe is neither"):
        read_tree(tmp_path)


def test_a_tree_has_a_bound(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    with pytest.raises(BadConfig, match="more than"):
        read_tree(tmp_path, most_bytes=99)
    with pytest.raises(BadConfig, match="more than"):
        read_tree(tmp_path, most_entries=0)


def test_a_file_that_is_none_is_refused(tmp_path, monkeypatch):
    real = written(tmp_path / "real.jsonl", LINE)
    (tmp_path / "link.jsonl").symlink_to(real)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "raw.jsonl").write_bytes(b"\xff")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, said in [
        ("link", "is a symbolic link; name the file"),
        ("pipe", "ordinary"),
        ("raw", "not UTF-8 at byte 0"),
        ("empty", "0 tasks"),
        ("gone", "cannot be read"),
    ]:
        with pytest.raises(BadConfig, match=said):
            load(tmp_path / f"{name}.jsonl")
    monkeypatch.setattr(tasksets, "MAX_TASKSET_BYTES", 10)
    with pytest.raises(BadConfig, match="larger than 10 bytes"):
        load(real)


def test_an_id_stands_once(tmp_path):
    with pytest.raises(BadConfig, match="'calc-1' occurs twice"):
        load(written(tmp_path / "bad.jsonl", LINE, LINE))


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path):
    path = written(tmp_path / "a.jsonl", LINE)
    before = path.read_text()
    bad = calc_task(about={"n": "\ud800"})
    with pytest.raises(BadConfig, match="Unicode"):
        taskset_of("a", [bad])
    forged = tasksets.Taskset(name="a", hash="0" * 64, tasks=(calc_task(),))
    with pytest.raises(BadConfig, match="does not match its hash"):
        save(forged, path)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_task_that_no_file_could_hold_is_refused():
    with pytest.raises(BadConfig, match=r"task 'calc-1', field 'world\.files"):
        taskset_of("a", [calc_task(spec=SandboxSpec(files={"/etc/passwd": b""}))])


def test_a_known_answer_is_kept_and_hashed_and_a_task_without_one_has_its_old_hash(tmp_path):
    known = {"question": "Which function?", "answer": "add"}
    plain, asked = written(tmp_path / "p.jsonl", LINE), written(tmp_path / "k.jsonl", changed("known", known))
    (task,) = load(asked).tasks
    assert task.known == KnownAnswer(**known)
    save(load(asked), tmp_path / "again.jsonl")
    assert load(tmp_path / "again.jsonl").hash == load(asked).hash != load(plain).hash


@pytest.mark.parametrize(
    ("known", "named"),
    [({"question": "Which?"}, "known.answer"), ({"question": "", "answer": "a"}, "known.question"), ("add", "known")],
)
def test_a_known_answer_that_says_too_little_is_refused_by_field(tmp_path, known, named):
    with pytest.raises(BadConfig, match=f"'{named}'"):
        load(written(tmp_path / "k.jsonl", changed("known", known)))
