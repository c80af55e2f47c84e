"""People and agents at work in a real git repository, by a script: the fate of every line is known by construction."""

import copy
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from ostinato_client.watch.git import Repository
from ostinato_client.watch.spool import Edit, append
from ostinato_client.watch.state import LINES_OF_A_CALL, State
from ostinato_client.watch.watcher import COMMIT, HORIZONS_S, Watcher, spool_directory

COMMON = ["    return None", "    else:", "    }", "", "    x += 1", "    )", "    pass", "    end"]
START = 1_700_000_000.0


@dataclass
class Line:
    """A line as it stands on disk; `ids` are the written lines of which it holds all or a piece. `goes_on`: it is no statement's first."""

    text: str
    ids: frozenset = frozenset()
    goes_on: bool = False


def counted(text):
    return any(char.isalnum() for char in text)


@dataclass
class Call:
    id: str
    at: float
    written: int = 0
    expected: dict = field(default_factory=dict)  # name -> the ids of the lines that are kept
    text: str = ""  # of its argument
    places: dict = field(default_factory=dict)  # a written line's id -> its line in the argument
    committed_since: bool = False


class World:
    """One repository, one person, some agents. Files are lists of blocks of lines; `random` decides."""

    def __init__(self, place: Path, random):
        self.place, self.random = place, random
        self.root = place / "repo"
        self.now, self.number = START, 0
        self.files: dict[str, list[list[Line]]] = {}
        self.snapshots: dict[str, dict[str, list[list[Line]]]] = {}  # commit -> files
        self.calls: list[Call] = []
        self.last_edit = None  # the file and its blocks before the newest change, if an agent made that
        self.root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.files[f"file_{self.next()}.py"] = [self.block() for _ in range(3)]
        self.save()
        self.commit()
        self.repository = Repository.at(self.root)
        self.events = {}
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.state.__exit__()

    def start(self):
        self.state = State(spool_directory(self.repository))
        self.watcher = Watcher(self.repository, self.state, lambda: self.now)

    # ------------------------------------------------------------ tools

    def git(self, *words):
        who = {
            "GIT_AUTHOR_NAME": "p",
            "GIT_AUTHOR_EMAIL": "p@x",
            "GIT_COMMITTER_NAME": "p",
            "GIT_COMMITTER_EMAIL": "p@x",
        }
        dates = {"GIT_AUTHOR_DATE": f"@{int(self.now)} +0000", "GIT_COMMITTER_DATE": f"@{int(self.now)} +0000"}
        env = os.environ | who | dates | {"GIT_EDITOR": "true", "GIT_CONFIG_GLOBAL": "/dev/null"}
        done = subprocess.run(["git", *words], cwd=self.root, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr, done.stdout)
        return done.stdout.strip()

    def next(self):
        self.number += 1
        return self.number

    def telling(self):
        n = self.next()
        return f"    value_{n} = compute_{n}(alpha_{n}, beta_{n})"

    def block(self):
        lines = [f"def work_{self.next()}(alpha):"]
        common = self.random.sample(COMMON, self.random.randint(1, 3))
        for _ in range(self.random.randint(2, 5)):
            lines.append(self.telling())
            if common and self.random.random() < 0.6:
                lines.append(common.pop())
        return [Line(text) for text in lines]

    def text(self, path):
        return "".join(f"{line.text}\n" for block in self.files[path] for line in block)

    def save(self):
        for path in self.files:
            (self.root / path).parent.mkdir(exist_ok=True, parents=True)
            (self.root / path).write_text(self.text(path))

    def lose(self, path, lines):
        """Lines were changed or taken away: no piece of what they held is whole."""
        gone = frozenset(id for line in lines for id in line.ids)
        for block in self.files[path]:
            for line in block:
                line.ids -= gone

    def standing(self, files):
        return {id for blocks in files.values() for block in blocks for line in block for id in line.ids}

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "work")
        self.snapshot()

    def snapshot(self):
        self.snapshots[self.git("rev-parse", "HEAD")] = copy.deepcopy(self.files)

    def committed(self):
        """A commit of all that stands was made."""
        standing = self.standing(self.files)
        for call in self.calls:
            call.committed_since = True
            if kept := frozenset(id for id in standing if id[0] == call.id):
                call.expected.setdefault(COMMIT, kept)

    # ------------------------------------------------------------ time

    def look(self):
        if self.random.random() < 0.1:  # the watcher dies and is started again
            self.state.__exit__()
            self.start()
        here = {id[0] for id in self.standing(self.files)}
        for call in self.calls:
            if (
                call.written
                and call.committed_since
                and self.now >= call.at + HORIZONS_S["lines_kept_24h"]
                and call.id not in here
            ):
                call.expected.setdefault(COMMIT, frozenset())
        self.watcher.look()
        calls = {call.number: call.id for call in self.state.open_calls()}
        seen = {divmod(number, LINES_OF_A_CALL) for file in self.state.files() for number in file.followed.kept}
        followed = {(calls[call], line) for call, line in seen if call in calls}
        assert followed == {id for id in self.standing(self.files) if id[0] in calls.values()}
        for event in self.state.waiting(1000):
            assert self.events.setdefault(event.id, event) == event

    def wait(self, seconds, elsewhere=None):
        """Time passes, and what is due is measured in its moment; `elsewhere`: files of a branch that was left for a while."""
        self.look()
        until = self.now + seconds
        due = sorted(
            (call.at + s, name, call)
            for call in self.calls
            for name, s in HORIZONS_S.items()
            for _ in [0]
            if call.written
        )
        standing = self.standing(self.files) | (self.standing(elsewhere) if elsewhere else set())
        for moment, name, call in sorted(due, key=lambda each: each[0]):
            if self.now < moment <= until:
                self.now = moment
                call.expected[name] = frozenset(id for id in standing if id[0] == call.id)
                self.look()
        self.now = until
        self.look()

    # ------------------------------------------------------------ agents

    def agent(self):
        """A tool call changes a file, or makes one."""
        call = Call(f"call_chatcmpl-{self.next():x}_0_0", self.now)
        make = self.random.random() < 0.15 or not self.files
        path = f"dir {self.next()}/new_{self.next()}.py" if make else self.random.choice(sorted(self.files))
        before = None if make else self.text(path)
        old = copy.deepcopy(self.files.get(path))
        if make:
            self.files[path] = []
        kind = self.random.choice([self._insert_block, self._rewrite, self._insert_lines, self._nest])
        if make or not any(len(block) > 3 for block in self.files[path]):
            kind = self._insert_block
        for line in kind(path):
            if counted(line.text):
                line.ids = frozenset([(call.id, call.written)])
                call.written += 1
        self.save()
        told = self._argument(call, path, before or "")
        edit = Edit("scripted", call.id, str(self.root / path), before or "", self.text(path), self.now, told)
        late = self.random.random() < 0.3
        if late:  # the watcher sees the file before it hears of the call
            self.look()
        append(spool_directory(self.repository), edit)
        self.calls.append(call)
        self.last_edit = None if make else (path, old)

    def _argument(self, call, path, before):
        """What the call was asked for: the whole file, or what replaces a part of it, as a hook places it in the file."""
        now, old = [line for block in self.files[path] for line in block], before.splitlines()
        begins = 0
        if self.random.random() < 0.5:
            while begins < min(len(old), len(now)) and old[begins] == now[begins].text:
                begins += 1
        call.text = "".join(f"{line.text}\n" for line in now[begins:])
        call.places = {id: at for at, line in enumerate(now[begins:], 1) for id in line.ids if id[0] == call.id}
        return ("content", begins, len(now) - begins)

    def _some_block(self, path, least=3):
        fit = [block for block in self.files[path] if len(block) >= least]
        return self.random.choice(fit) if fit else None

    def _insert_block(self, path):
        block = self.block()
        self.files[path].insert(self.random.randint(0, len(self.files[path])), block)
        return block

    def _rewrite(self, path):
        block = self._some_block(path)
        start = self.random.randint(0, len(block) - 1)
        end = min(len(block), start + self.random.randint(1, 3))
        self.lose(path, block[start:end])
        new = [Line(self.telling()) for _ in range(self.random.randint(1, 3))]
        block[start:end] = new
        return new

    def _insert_lines(self, path):
        block = self._some_block(path)
        free = [text for text in COMMON if text not in {line.text.strip() for line in block}]
        free = [text for text in free if text.strip() not in {line.text.strip() for line in block}]
        new = [Line(self.telling()), *[Line(text) for text in free[:1]]]
        at = self.random.choice([n for n in range(1, len(block) + 1) if n == len(block) or not block[n].goes_on])
        block[at:at] = new
        return new

    def _nest(self, path):
        block = self._some_block(path)
        for line in block:
            line.text = f"    {line.text}" if line.text else ""
        header = Line(f"if flag_{self.next()}:")
        block.insert(0, header)
        return [header]

    # ------------------------------------------------------------ the person

    def _own(self):
        self.last_edit = None
        return self.random.choice(sorted(self.files)) if self.files else None

    def undo(self):
        """By hand: the file as it was before the newest call."""
        if self.last_edit is None:
            return
        path, old = self.last_edit
        self.files[path] = old
        self.last_edit = None
        self.save()

    def edit(self):
        """Some lines in a row get other text."""
        if (path := self._own()) and (block := self._some_block(path)):
            start = self.random.randint(0, len(block) - 1)
            lines = block[start : start + self.random.randint(1, 2)]
            self.lose(path, lines)
            for line in lines:
                line.text = self.telling()
            self.save()

    def insert(self):
        if path := self._own():
            kind = (
                self._insert_block if self.random.random() < 0.5 or not self._some_block(path) else self._insert_lines
            )
            kind(path)
            self.save()

    def delete(self):
        """A whole block, or some lines in a row."""
        if (path := self._own()) and self.files[path]:
            block = self.random.choice(self.files[path])
            start = self.random.randint(0, len(block) - 1) if len(block) > 4 and self.random.random() < 0.5 else 0
            end = len(block) if start == 0 else min(len(block), start + self.random.randint(1, 2))
            self.lose(path, block[start:end])
            del block[start:end]
            self.files[path] = [block for block in self.files[path] if block]
            self.save()

    def move(self):
        """A block goes elsewhere in its file."""
        if path := self._own():
            fit = [block for block in self.files[path] if sum(counted(line.text) for line in block) >= 3]
            if fit:
                block = self.random.choice(fit)
                self.files[path] = [each for each in self.files[path] if each is not block]
                self.files[path].insert(self.random.randint(0, len(self.files[path])), block)
                self.save()

    def reformat(self):
        """Spaces, and a formatter's line breaks."""
        if path := self._own():
            for block in self.files[path]:
                for at in reversed(range(len(block))):
                    line, dice = block[at], self.random.random()
                    head, _, tail = line.text.partition("(")
                    if dice < 0.4 and tail.endswith(")") and "," in tail:
                        first, _, second = tail[:-1].partition(", ")
                        texts = [f"{head}(", f"        {first},", f"        {second},", "    )"]
                        block[at : at + 1] = [
                            Line(text, line.ids if counted(text) else frozenset(), text != texts[0]) for text in texts
                        ]
                    elif dice < 0.7 and line.text:
                        line.text = f"  {line.text}  "
            self.save()

    def rename(self):
        if path := self._own():
            new = f"{'sub/' if self.random.random() < 0.5 else ''}renamed_{self.next()}.py"
            self.files[new] = self.files.pop(path)
            (self.root / new).parent.mkdir(exist_ok=True)
            (self.root / path).rename(self.root / new)
            if self.random.random() < 0.5:
                self.git("add", "-A")

    def remove(self):
        if len(self.files) > 1 and (path := self._own()):
            del self.files[path]
            (self.root / path).unlink()

    def keep(self):
        """Commit everything."""
        self.commit()
        self.committed()

    def revert(self):
        """Commit, revert that, and perhaps revert the revert."""
        self.keep()
        self.wait(60)
        parent = self.git("rev-parse", "HEAD^")
        if not self.git("diff", "--name-only", "HEAD^", "HEAD"):
            return
        kept = copy.deepcopy(self.files)
        self._set(self.snapshots[parent])
        self.git("revert", "--no-edit", "HEAD")
        self._after_git()
        if self.random.random() < 0.5:
            self.wait(self.random.choice([60, 4000]))
            self._set(kept)
            self.git("revert", "--no-edit", "HEAD")
            self._after_git()

    def amend(self):
        self.git("add", "-A")
        self.git("commit", "-q", "--amend", "--no-edit", "--allow-empty")
        self.snapshot()
        self.committed()
        self.last_edit = None

    def stash(self):
        """Set aside what is not committed, for a while."""
        self.last_edit = None
        self.git("add", "-A")
        if not self.git("status", "--porcelain"):
            return
        kept = copy.deepcopy(self.files)
        self._set(self.snapshots[self.git("rev-parse", "HEAD")])
        self.git("stash", "-q")
        self.wait(self.random.choice([60, 400]))
        self._set(kept)
        self.git("stash", "pop", "-q", "--index")

    def branch(self):
        """Work goes to a branch, main goes on, and the work comes back by merge, squash or rebase; or is looked at from afar."""
        base = self.git("rev-parse", "HEAD")
        name = f"feature-{self.next()}"
        self.git("switch", "-q", "-c", name)
        self.keep()
        self.wait(60)
        if self.random.random() < 0.5:
            self.edit()
            self.wait(60)
            self.keep()
            self.wait(60)
        feature = copy.deepcopy(self.files)
        self._set(self.snapshots[base])
        self.git("switch", "-q", "main")
        self.wait(self.random.choice([60, 500, 4000]), elsewhere=feature)
        merged = self._upstream(feature)
        self.wait(60, elsewhere=feature)
        how = self.random.choice(["merge", "squash", "rebase", "drop"])
        if how == "merge":
            self._set(merged)
            self.git("merge", "-q", "--no-ff", "--no-edit", name)
        elif how == "squash":
            self._set(merged)
            self.git("merge", "-q", "--squash", name)
            self.git("commit", "-q", "--allow-empty", "-m", "squashed")
        elif how == "rebase":
            self.git("switch", "-q", name)
            self._set(merged)
            self.git("rebase", "-q", "main")
            self.git("switch", "-q", "main")
            self.git("merge", "-q", "--ff-only", name)
        self._after_git()
        if how in ("squash", "drop") or self.random.random() < 0.5:
            self.wait(0, elsewhere=feature if how == "drop" else None)
            self.git("branch", "-q", "-D", name)

    def _upstream(self, feature):
        """Somebody else's commit: a file of its own, and a block at the top of another; what feature and it are together."""
        other = f"upstream_{self.next()}.py"
        self.files[other] = [self.block()]
        merged = copy.deepcopy(feature) | {other: copy.deepcopy(self.files[other])}
        for path, blocks in self.files.items():
            same = [
                [[line.text for line in block] for block in files.get(path, [])[:1]] for files in (self.files, feature)
            ]
            if path in feature and same[0] == same[1] and len(same[0][0]) > 3:
                block = self.block()
                blocks.insert(0, block)
                merged[path].insert(0, copy.deepcopy(block))
                break
        self.save()
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "upstream")
        self.snapshot()
        for call in self.calls:
            call.committed_since = True
        return merged

    def _set(self, files):
        self.files = copy.deepcopy(files)
        self.last_edit = None

    def _after_git(self):
        on_disk = {str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file() and ".git" not in p.parts}
        assert on_disk == set(self.files), (on_disk, set(self.files))
        for path in self.files:
            assert (self.root / path).read_text() == self.text(path), path
        self.snapshot()
        self.committed()


PEOPLE = [
    "undo", "edit", "insert", "delete", "move", "reformat", "rename", "remove", "keep", "revert", "amend", "stash", "branch",
]  # fmt: skip


def play(world, steps, often=()):
    """A script: agents and the person by turns, who does some things `often`; then time until everything is measured."""
    world.agent()
    world.wait(30)
    for _ in range(steps):
        if world.random.random() < 0.4:
            world.agent()
        else:
            getattr(world, world.random.choice(often if often and world.random.random() < 0.6 else PEOPLE))()
        world.wait(world.random.choice([30, 120, 700, 5000]))
    world.wait(90_000)
