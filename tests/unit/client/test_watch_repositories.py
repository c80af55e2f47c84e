"""The watcher in repositories that are odd or hostile, with spools that are spoiled."""

import errno
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ostinato_client.connect.terminal import Terminal
from ostinato_client.sending import Sender
from ostinato_client.watch import files, running, state
from ostinato_client.watch.delivery import Delivery, known_url
from ostinato_client.watch.git import GitError, Repository
from ostinato_client.watch.hook import watched
from ostinato_client.watch.spool import SPOOL, Edit, Spool, append, parse
from ostinato_client.watch.state import Held, State
from ostinato_client.watch.watcher import Watcher, spool_directory

WHO = ("-c", "user.name=p", "-c", "user.email=p@x", "-c", "protocol.file.allow=always")
CODE = "def secret_plan(alpha):\n    return alpha + 42\n"


def git(root, *words, env=None):
    done = subprocess.run(["git", *WHO, *words], cwd=root, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Tree:
    """A repository with one commit, its watcher, and a clock that is set by hand."""

    def __init__(self, root):
        self.root, self.now = root, 1_000_000.0
        if not root.exists():
            root.mkdir()
            git(root, "init", "-q", "-b", "main")
            (root / "old.py").write_text("old = 1\n")
            git(root, "add", "-A")
            git(root, "commit", "-q", "-m", "start", env=self.dated())
        self.repository = Repository.at(root)
        self.directory = spool_directory(self.repository)
        self.state = State(self.directory)
        self.calls = 0

    def dated(self):
        return os.environ | {"GIT_COMMITTER_DATE": f"@{int(self.now)} +0000"}

    def write(self, name, text=CODE, before=""):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self.tell(path, text, before)

    def tell(self, path, text, before=""):
        self.calls += 1
        call = f"call_chatcmpl-{self.calls:x}_0_0"
        append(self.directory, Edit("scripted", call, str(path), before, text, self.now))
        return call

    def look(self, after_s=0.0):
        self.now += after_s
        Watcher(self.repository, self.state, lambda: self.now).look()
        return {(event.target, event.name): event.value for event in self.state.waiting(1000)}

    def commit(self):
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "-m", "work", env=self.dated())


@pytest.fixture
def tree(tmp_path):
    made = Tree(tmp_path / "repo")
    yield made
    made.state.__exit__()


@pytest.mark.parametrize(
    "name", ["--output=x.py", "-n", "a\nb.py", ":(glob)*.py", "ünï/cöde.py", 'q"u o\\te.py', "*.py", "tab\t.py"]
)
def test_a_file_may_be_called_anything(tree, name):
    call = tree.write(name)
    tree.look()
    tree.now += 60
    tree.commit()
    assert tree.look() == {(call, "lines_kept_commit"): 1.0}
    (tree.root / name).rename(tree.root / "--cached")
    assert tree.look(300)[call, "lines_kept_5m"] == 1.0


def test_nothing_that_a_repository_configures_is_run(tree):
    marker = tree.root.parent / "ran"
    script = tree.root.parent / "evil.sh"
    script.write_text(f"#!/bin/sh\necho ran >> {marker}\n")
    script.chmod(0o755)
    call = tree.write("mine.py")
    tree.look()
    tree.now += 1
    tree.commit()
    for name in (
        "core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command", "filter.evil.clean", "filter.evil.smudge",
        "filter.evil.process", "core.pager", "core.editor", "core.sshCommand", "core.askPass", "credential.helper", "core.gitProxy",
    ):  # fmt: skip
        git(tree.root, "config", name, str(script))
    hooks = tree.root / ".git" / "hooks"
    for name in ("post-index-change", "reference-transaction", "post-checkout", "fsmonitor-watchman"):
        (hooks / name).write_text(script.read_text())
        (hooks / name).chmod(0o755)
    (tree.root / ".gitattributes").write_text("*.py diff=evil filter=evil\n")
    (tree.root / "mine.py").rename(tree.root / "moved.py")
    marker.unlink(missing_ok=True)
    assert tree.look(300) == {(call, "lines_kept_5m"): 1.0, (call, "lines_kept_commit"): 1.0}
    assert not marker.exists()


def test_links_lead_nowhere(tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "theirs.py").write_text(CODE)
    (tree.root / "link.py").symlink_to(outside / "theirs.py")
    (tree.root / "linked").symlink_to(outside)
    for name in ("link.py", "linked/theirs.py", "../outside/theirs.py", ".git/config"):
        tree.tell(tree.root / name, CODE)
    call = tree.write("dir/mine.py")
    assert tree.look() == {}
    assert tree.state.counts()["passed_over"] == 4
    (tree.root / "dir" / "mine.py").rename(outside / "mine.py")
    (tree.root / "dir").rmdir()
    (tree.root / "dir").symlink_to(outside)
    assert tree.look(300) == {(call, "lines_kept_5m"): 0.0}


def test_what_is_binary_or_too_large_is_passed_over(tree):
    tree.write("a.bin", "x = 1\0\n")
    tree.write("large.py", "value = 1\n" * 200_000)
    tree.write("many.py", "v1\n" * 30_000)
    call = tree.write("grows.py")
    tree.look()
    (tree.root / "grows.py").write_text(CODE * 50_000)
    assert tree.look(300) == {(call, "lines_kept_5m"): 0.0}
    assert tree.state.counts()["passed_over"] == 3


def test_a_spoiled_spool_costs_its_spoiled_lines_only(tree):
    good = Edit("scripted", "call_chatcmpl-a_0_0", str(tree.root / "a.py"), "", CODE, tree.now)
    (tree.root / "a.py").write_text(CODE)
    fields = json.loads(good.line())
    bad = [
        good.line()[:40],  # cut, and another writer went on
        b"{}", b"[]", b"null", b"\xff\xfe", b'{"v": 1', b"[" * 100_000, b"1" * 5000,
        *(json.dumps({**fields, **change}).encode() for change in (
            {"v": 2}, {"at": "now"}, {"at": -1}, {"at": 1e300}, {"at": True}, {"file": 5}, {"after": None}, {"before": 7}, {"call": 1},
        )),
    ]  # fmt: skip
    spool = tree.directory / SPOOL
    spool.write_bytes(b"\n".join(bad) + b"\n" + good.line() + b'{"v": 1, "agent": "half')
    tree.look()
    assert tree.state.counts()["calls"] == 1
    assert tree.state.counts()["spoiled"] == len(bad)
    with spool.open("ab") as file:
        file.write(b'"}\n')
    tree.look()
    assert tree.state.counts()["spoiled"] == len(bad) + 1
    assert parse(json.dumps({**fields, "at": float("nan")}).encode()) is None


def test_a_repeated_line_and_a_lost_position_count_once(tree):
    call = tree.write("a.py")
    tree.look()
    spool = (tree.directory / SPOOL).read_bytes()
    (tree.directory / SPOOL).write_bytes(spool + spool)
    tree.look()
    assert tree.state.counts()["lines"] == 2
    assert tree.look(300) == {(call, "lines_kept_5m"): 1.0}


def test_the_spool_does_not_grow_for_ever(tree, monkeypatch):
    monkeypatch.setattr("ostinato_client.watch.spool._ROTATED_AT", 1000)
    monkeypatch.setattr("ostinato_client.watch.spool.MOST_BYTES", 5000)
    positions = {}
    read = 0
    for number in range(60):
        spool = Spool(tree.directory, positions)
        assert append(tree.directory, Edit("a", "c", f"/f{number}", "", "x = 1\n", 1.0))
        read += sum(1 for _ in spool.read())
        positions = spool.positions
        spool.rotate()
    assert read == 60
    assert sum(path.stat().st_size for path in tree.directory.glob("spool*")) < 4000
    while append(tree.directory, Edit("a", "c", "/f", "", "x = 1\n", 1.0)):
        pass
    assert (tree.directory / SPOOL).stat().st_size < 6000


def test_one_watcher_and_no_more_until_it_is_killed(tree):
    tree.state.__exit__()
    code = "import sys, time, pathlib; from ostinato_client.watch.state import State"
    code += "; held = State(pathlib.Path(sys.argv[1])); print(1, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tree.directory)], stdout=subprocess.PIPE, env=os.environ)
    assert other.stdout is not None
    assert other.stdout.readline() == b"1\n"
    with pytest.raises(Held, match="another watcher"):
        State(tree.directory)
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdout.close()
    tree.state = State(tree.directory)


@pytest.mark.parametrize("spoil", ["not a database" * 100, "version"])
def test_a_damaged_state_names_itself_and_the_remedy(tree, spoil):
    tree.state.set_meta("schema", 2)
    tree.state.__exit__()
    if spoil != "version":
        (tree.directory / "state.db").write_text(spoil)
    with pytest.raises(sqlite3.DatabaseError, match=r"state\.db.*set it aside"):
        State(tree.directory)
    (tree.directory / "state.db").unlink()
    tree.state = State(tree.directory)


@pytest.mark.parametrize(("call", "code"), [("stat", errno.ESTALE), ("stat", errno.EIO), ("open", errno.EACCES)])
def test_lines_of_a_file_that_cannot_be_read_just_now_are_not_taken_for_gone(tree, monkeypatch, call, code):
    """On a share that hangs, or written by an agent in a container that lets nobody else read."""
    real, written, others = getattr(os, call), tree.write("a.py"), tree.write("b.py")

    def refused(path, *args, **more):
        if str(path).endswith("a.py"):
            raise OSError(code, os.strerror(code))
        return real(path, *args, **more)

    with monkeypatch.context() as refusing:
        refusing.setattr(os, call, refused)
        watcher = Watcher(tree.repository, tree.state, lambda: tree.now)
        watcher.look()
        tree.now += 300
        watcher.look()
        assert watcher.trouble == f"a.py cannot be read: {os.strerror(code)}"
        assert tree.look() == {(others, "lines_kept_5m"): 1.0}
    assert tree.look(10) == {(each, "lines_kept_5m"): 1.0 for each in (written, others)}


def test_a_file_that_cannot_be_read_has_nothing_searched_for_more_often(tree, monkeypatch):
    real, lost, searches = os.stat, tree.write("lost.py", "lost = 1\n"), []
    tree.write("a.py")
    tree.look()
    (tree.root / "lost.py").unlink()

    def refused(path, *args, **more):
        if str(path).endswith("a.py"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **more)

    arrivals = tree.repository.arrivals
    monkeypatch.setattr(tree.repository, "arrivals", lambda *heads: searches.append(tree.now) or arrivals(*heads))
    monkeypatch.setattr(os, "stat", refused)
    watcher = Watcher(tree.repository, tree.state, lambda: tree.now)
    tree.now += 300
    watcher.look()
    assert [event.target for event in tree.state.waiting(1000)] == [lost], "the other one's lines are not known"
    searches.clear()
    for _ in range(29):
        tree.now += 2
        watcher.look()
    assert searches == []
    tree.now += 2
    watcher.look()
    assert searches == [tree.now]


def test_a_full_disk_costs_a_look_and_not_the_watcher(tree):
    calls = [tree.write("a.py")]
    tree.look()
    (pages,) = tree.state._db.execute("PRAGMA page_count").fetchone()
    calls.append(tree.write("b.py", "".join(f"value_{i} = {hash((i, 'x'))}\n" for i in range(3000))))
    tree.state._db.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            tree.look()
    tree.state._db.execute("PRAGMA max_page_count = 100000")
    tree.look()
    found = tree.look(300)
    assert {(call, "lines_kept_5m"): 1.0 for call in calls} == found


def test_a_commit_that_fails_is_undone(tree):
    """A reader elsewhere that holds the database is enough, as a backup program."""
    tree.state._db.execute("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(tree.directory / "state.db", isolation_level=None)
    call = tree.write("a.py")
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM files").fetchone()
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            tree.look()
    other.close()
    tree.look()
    assert tree.look(300) == {(call, "lines_kept_5m"): 1.0}


def test_watching_goes_on_when_what_was_sent_cannot_be_stored(tree, monkeypatch):
    tree.state.__exit__()
    tried = []

    class Full:
        trouble = ""

        def __init__(self, *_):
            pass

        def send(self):
            tried.append(1)
            raise sqlite3.OperationalError("database or disk is full") if len(tried) < 3 else KeyboardInterrupt

    monkeypatch.setattr(running, "Delivery", Full)
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        running.watch(tree.root, "http://127.0.0.1:9", None, once=False, interval_s=0.0, terminal=Terminal(shown))
    assert "disk is full" in shown.getvalue()
    tree.state = State(tree.directory)


def test_a_server_that_is_no_gateway_delays_and_breaks_nothing(tree):
    class Other(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_):
            pass

    tree.write("a.py")
    tree.look()
    tree.look(300)
    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        delivery = Delivery(tree.state, Sender(f"http://127.0.0.1:{server.server_port}", None), lambda: tree.now)
        assert delivery.send() is False
        assert "no gateway" in delivery.trouble
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert tree.state.counts()["waiting"] == 1


def test_a_server_that_takes_no_lines_gets_the_share(tree):
    taken = []

    class Earlier(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            events = body if isinstance(body, list) else [body]
            good = not any("lines" in event for event in events)
            taken.extend(events if good else ())
            answers = [{"id": event["id"], "status": "accepted"} for event in events]
            answer = (answers if isinstance(body, list) else answers[0]) if good else {"error": {"message": "lines?"}}
            self.send_response(202 if good else 400)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    for name in ("a.py", "b.py"):
        (tree.root / name).write_text(CODE)
        tree.calls += 1
        call = f"call_chatcmpl-{tree.calls:x}_0_0"
        append(tree.directory, Edit("s", call, str(tree.root / name), "", CODE, tree.now, ("content", 0, 2)))
    tree.look()
    tree.look(300)
    told = [{"argument": "content", "of": 2, "followed": "1-2", "kept": "1-2"}]
    assert [event.lines for event in tree.state.waiting(9)] == [told, told]
    server = HTTPServer(("127.0.0.1", 0), Earlier)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        delivery = Delivery(tree.state, Sender(f"http://127.0.0.1:{server.server_port}", None), lambda: tree.now)
        assert delivery.send() is True
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [(event["value"], event["comment"]) for event in taken] == [(1.0, "2 of 2 lines")] * 2
    assert tree.state.counts()["refused"] == tree.state.counts()["waiting"] == 0


@pytest.mark.parametrize(
    "text", [["content", 1, 2], ["content", 0, 1], ["content", 0, 5, 1], ["content", -1, 2], ["content", True, 2], 7]
)
def test_places_that_do_not_fit_are_not_told(tree, text):
    (tree.root / "a.py").write_text(CODE)
    append(tree.directory, Edit("s", "call_chatcmpl-1_0_0", str(tree.root / "a.py"), "", CODE, tree.now, text))
    tree.look()
    tree.look(300)
    (event,) = tree.state.waiting(9)
    assert (event.value, event.lines) == (1.0, None)


def test_the_address_is_a_persons_own_and_never_a_repositorys(tree, tmp_path):
    env = {"HOME": str(tmp_path)}
    for place in (tree.root, tmp_path):
        for name, text in (
            (".claude/settings.local.json", '{"env": {"ANTHROPIC_BASE_URL": "http://evil.example"}}'),
            ("opencode.json", '{"provider": {"ostinato": {"options": {"baseURL": "http://evil.example/v1"}}}}'),
        ):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(text)
    assert known_url(env) == "http://127.0.0.1:8321"
    (tmp_path / ".claude" / "settings.json").write_text(
        '{"env": {"ANTHROPIC_BASE_URL": "https://gate.example:1/s/fix-login"}}'
    )
    assert known_url(env) == "https://gate.example:1"
    assert known_url(env | {"OSTINATO_URL": "http://other:2/v1"}) == "http://other:2"
    for text in ("{", "[]", '{"env": 5}', '{"env": {"ANTHROPIC_BASE_URL": "https://api.anthropic.com"}}'):
        (tmp_path / ".claude" / "settings.json").write_text(text)
        assert known_url(env) == "http://127.0.0.1:8321"


def test_a_look_that_fails_did_not_happen(tree, monkeypatch):
    call = tree.write("a.py")
    tree.look()

    def broken(*_):
        raise OSError("no")

    (tree.root / "a.py").write_text("other = 1\n")
    with monkeypatch.context() as patched:
        patched.setattr(State, "measure", broken)
        with pytest.raises(OSError, match="no"):
            tree.look(300)
    assert tree.state.counts()["waiting"] == 0
    (tree.root / "a.py").write_text(CODE)
    assert tree.look() == {(call, "lines_kept_5m"): 1.0}


def test_in_the_middle_of_a_merge_nothing_is_measured(tree):
    call = tree.write("old.py", "old = 2\n", "old = 1\n")
    tree.look()
    git(tree.root, "stash", "-q")
    git(tree.root, "switch", "-q", "-c", "other")
    (tree.root / "old.py").write_text("old = 3\n")
    tree.commit()
    subprocess.run(["git", *WHO, "stash", "pop", "-q"], cwd=tree.root, capture_output=True, check=False)
    git(tree.root, "checkout", "-q", "--theirs", "old.py")
    (tree.root / ".git" / "MERGE_HEAD").write_text(f"{git(tree.root, 'rev-parse', 'HEAD')}\n")
    (tree.root / "old.py").write_text("<<<<<<< ours\n")
    assert tree.look(300) == {}
    (tree.root / "old.py").write_text("old = 2\n")
    (tree.root / ".git" / "MERGE_HEAD").unlink()
    assert tree.look(10) == {(call, "lines_kept_5m"): 1.0}


def test_whoever_looks_too_late_says_nothing_of_that_time(tree):
    call = tree.write("a.py")
    tree.look()
    assert tree.look(3600) == {(call, "lines_kept_1h"): 1.0}


def test_a_head_without_branch_or_commit(tmp_path):
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "-q")
    unborn = Tree(tmp_path / "new")
    call = unborn.write("a.py")
    assert unborn.look() == {}
    unborn.now += 10
    unborn.commit()
    assert unborn.look() == {(call, "lines_kept_commit"): 1.0}
    git(unborn.root, "checkout", "-q", "--detach")
    (unborn.root / "a.py").write_text("gone = 1\n")
    unborn.commit()
    assert unborn.look(290)[call, "lines_kept_5m"] == 0.0
    unborn.state.__exit__()


def test_worktrees_have_watchers_of_their_own_and_submodules_are_repositories(tree, tmp_path):
    git(tree.root, "worktree", "add", "-q", str(tmp_path / "beside"), "-b", "beside")
    assert watched(tree.root / "old.py") == tree.directory
    beside = watched(tmp_path / "beside" / "old.py")
    assert beside == tree.root / ".git" / "worktrees" / "beside" / "ostinato", "open since the repository is"
    other = Tree(tmp_path / "beside")
    assert other.directory == beside
    call = other.write("a.py")
    assert other.look() == {}
    assert other.look(300) == {(call, "lines_kept_5m"): 1.0}
    other.state.__exit__()
    git(tree.root, "submodule", "--quiet", "add", str(tree.root), "sub")
    assert watched(tree.root / "sub" / "old.py") is None, "nobody watches it"


def test_a_git_file_that_leads_nowhere_opens_nothing(tmp_path):
    for text in ("gitdir: /nowhere", "nonsense", "", f"gitdir: {tmp_path}"):
        (tmp_path / ".git").write_text(text)
        (tmp_path / "ostinato").mkdir(exist_ok=True)
        assert watched(tmp_path / "a.py") is None


def test_a_place_without_a_working_tree_is_refused(tmp_path):
    with pytest.raises(GitError):
        Repository.at(tmp_path)
    git(tmp_path, "init", "-q", "--bare", "bare")
    with pytest.raises(GitError):
        Repository.at(tmp_path / "bare")


def test_only_counts_leave_the_machine(tree):
    tree.write("plan.py")
    tree.look()
    (event,) = (tree.look(300), tree.state.waiting(10))[1]
    assert set(event.to_json()) == {"id", "target", "name", "value", "source", "comment", "occurred_at"}
    assert event.comment == "2 of 2 lines"
    assert "plan" not in json.dumps(event.to_json())
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tree.directory / SPOOL, tree.directory / "state.db"))


def test_calls_of_other_models_are_followed_and_not_told(tree):
    (tree.root / "a.py").write_text(CODE)
    append(tree.directory, Edit("claude-code", "toolu_01AbC", str(tree.root / "a.py"), "", CODE, tree.now))
    tree.look()
    assert tree.look(300) == {}
    assert tree.state.counts()["lines"] == 2


def test_calls_that_are_done_are_let_go(tree):
    tree.write("a.py")
    tree.look()
    tree.now += 1
    tree.commit()
    for after_s in (300, 3300, 83_000):
        tree.look(after_s)
    assert tree.state.counts()["files"] == tree.state.counts()["calls"] == 0
    assert len(tree.state.waiting(10)) == 4
    tree.look(31 * 86_400)
    tree.write("b.py")
    tree.look()
    assert tree.state.call("call_chatcmpl-1_0_0", "x", 0.0).written == 0, "its row is gone"


def test_a_number_has_room_for_every_line_of_a_call():
    assert state.LINES_OF_A_CALL > files.LONGEST / 2
    assert Path(files.__file__).name == "files.py"
