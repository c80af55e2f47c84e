"""Looks at the working tree: takes in the hooks' edits, follows the lines, and makes the signals about them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ostinato_client.events import Event
from ostinato_client.watch import files
from ostinato_client.watch.git import Head, Repository
from ostinato_client.watch.spool import Edit, Spool
from ostinato_client.watch.state import LINES_OF_A_CALL, Call, File, State, Text
from ostinato_client.watch.survival import Followed, Version, likest

HORIZONS_S = {"lines_kept_5m": 300.0, "lines_kept_1h": 3600.0, "lines_kept_24h": 86_400.0}
COMMIT = "lines_kept_commit"
_LATE = 0.5  # of a horizon: a look that is later than that has missed it
_LONGEST_RANGES = 4096  # characters of line numbers that a gateway takes
_DAY_S = 86_400.0
_COMMIT_WAIT_S = 7 * _DAY_S
_REMEMBERED_S = 30 * _DAY_S
_MOST_FILES = 2000
_SEARCH_S = 60.0  # between two searches for lost files while nothing happens: a search reads the whole directory
_MOST_CANDIDATES = 200  # files that are read to find a lost file's new name
# the gateway's own ids: only those lead to a turn
_OUR_CALL = re.compile(r"call_(?:[a-z]+-[0-9a-f-]+_[0-9]{1,4}|[cmrt][0-9A-Za-z]{1,40})_[0-9]{1,6}")


class Watcher:
    """Follows the lines of one working tree.

    Args:
        repository: the working tree.
        state: the stored state of the watch.
        clock: Unix seconds.

    Example: ``Watcher(repository, State(directory), clock).look()``
    """

    def __init__(self, repository: Repository, state: State, clock: Callable[[], float]) -> None:
        self._repository = repository
        self._state = state
        self._clock = clock
        self.directory = spool_directory(repository)
        # which file could not be read at the last look, and why; at the horizons its lines are measured once it can be
        self.trouble = ""
        self._searched: dict[int, float] = {}  # when each lost file was last searched for

    def look(self) -> None:
        """Take in what happened since the last look, and measure what is due. Raises GitError, OSError."""
        spool = Spool(self.directory, self._state.meta("spool", {}))
        now, self.trouble = self._clock(), ""
        with self._state.look():
            for edit in spool.read():
                self._take(edit)
            self._state.set_meta("spool", spool.positions)
            if not self._repository.busy():
                self._see(now)
        spool.rotate()

    def _see(self, now: float) -> None:
        last = self._state.meta("head")
        calls = self._state.open_calls()
        if not calls and not self._state.files():
            return
        head = self._repository.head()
        lost, unread = self._read_all(head)
        self._searched = {file.number: self._searched.get(file.number, -1e300) for file in lost}
        blind = {number for number, touched in self._state.touched().items() if touched & unread}
        due = any(_is_due(call, now) for call in calls if call.number not in blind)
        urgent = due or (last or [None])[0] != head.commit
        if any(urgent or now >= at + _SEARCH_S for at in self._searched.values()):
            self._find_again(lost, head)
            self._searched = dict.fromkeys(self._searched, now)
        commits = self._commits(last, head, calls)
        self._state.set_meta("head", [head.commit, head.branch])
        self._measure(calls, commits, head, now, blind)
        self._tidy(now)

    # ------------------------------------------------------------ edits and files

    def _take(self, edit: Edit | None) -> None:
        path = None if edit is None else files.within(self._repository.root, edit.file)
        if edit is None or path is None:
            self._count("spoiled" if edit is None else "passed_over")
            return
        if not self._state.is_new(hashlib.sha256(edit.line()).digest(), edit.at):
            return
        before = None if edit.before is None else files.lines_of_text(edit.before)
        after = files.lines_of_text(edit.after)
        file = self._state.file(path)
        if (
            after is None
            or (file is None and before is None)
            or (file is None and len(self._state.files()) >= _MOST_FILES)
        ):
            self._count("passed_over")  # binary, too large, of unknown earlier content, or one file too many
            return
        known = file.followed if file is not None else Followed(Version.of(before or ()))
        known = known if before is None else known.changed(before)
        if edit.call is None:
            if file is not None:
                file.followed, file.signature = known.changed(after), None
                self._state.keep(file)
            return
        call = self._state.call(edit.call[:256], edit.agent, edit.at)
        followed, lines = known.written(after, first=call.number * LINES_OF_A_CALL + call.written)
        if file is None and not lines:
            return
        file = file or File(0, path, followed)
        file.followed, file.signature = followed, None
        self._state.keep(file)
        if lines:
            if edit.text is not None:
                self._keep_text(call, followed, edit.text)
            self._state.wrote(call, file, lines)

    def _keep_text(self, call: Call, followed: Followed, told: tuple[str, int, int]) -> None:
        """Record where the lines that a call just wrote stand in its argument, if all of them stand there."""
        argument, begins, lines = told
        first = call.number * LINES_OF_A_CALL + call.written
        written = sorted((number, j) for j, own in enumerate(followed.now.numbers) for number in own if number >= first)
        places = tuple(j - begins + 1 for number, j in written if call.owns(number))
        if places and places[0] >= 1 and places[-1] <= lines:
            self._state.keep_text(call, Text(call.written, argument, lines, places))

    def _count(self, name: str) -> None:
        self._state.set_meta(name, self._state.meta(name, 0) + 1)

    def _read_all(self, head: Head) -> tuple[list[File], set[int]]:
        """Read the followed files' present contents; returns those that are gone, and the numbers of those that cannot be read."""
        lost: list[File] = []
        unread: set[int] = set()
        for file in self._state.files():
            there = self._is_there(file, head)
            if there is None:
                unread.add(file.number)
            elif not there:
                lost.append(file)
        return lost, unread

    def _is_there(self, file: File, head: Head) -> bool | None:
        """As `_read`; None, and `trouble` says why, if it cannot be read."""
        try:
            return self._read(file, head)
        except OSError as error:
            self.trouble = f"{file.path} cannot be read: {error.strerror}"
            return None

    def _read(self, file: File, head: Head) -> bool:
        """Read a file's present content; False if the file is gone. Raises OSError."""
        root = self._repository.root
        signature = files.signature(root, file.path)
        if signature is None:
            return False
        if signature != file.signature:
            lines = files.read(root, file.path)
            if lines is None:
                return False
            same = tuple(lines) == file.followed.now.lines
            file.followed = file.followed.changed(lines)
            file.signature = signature if same else None  # read again until two looks find the same
            self._at_home(file, head)
            self._state.keep(file)
        elif file.head != head.commit or (head.branch or "") not in file.homes:
            self._at_home(file, head)
            self._state.keep(file)
        return True

    def _at_home(self, file: File, head: Head) -> None:
        file.head = head.commit
        file.stands_on(head.branch or "")

    def _find_again(self, lost: list[File], head: Head) -> None:
        """Follow renamed files to their new names; other lost files count as empty for now."""
        known = {file.path for file in self._state.files()}
        arrivals: dict[str | None, list[str]] = {}
        texts: dict[str, list[str] | None] = {}
        for file in lost:
            text = file.followed.now if file.followed.now.lines or not file.followed.past else file.followed.past[-1]
            if file.head not in arrivals:
                arrivals[file.head] = self._repository.arrivals(file.head, head.commit)
            names = [name for name in arrivals[file.head] if name not in known]
            suffix = Path(file.path).suffix
            names.sort(key=lambda name: (name not in file.former, Path(name).suffix != suffix, name))
            for name in names[:_MOST_CANDIDATES]:
                if name not in texts:
                    texts[name] = self._candidate(name)
            near = [(name, lines) for name in names[:_MOST_CANDIDATES] if (lines := texts[name])]
            found = likest(text.lines, [lines for _, lines in near], [name in file.former for name, _ in near])
            if found is None:
                file.followed = file.followed.changed(())
            else:
                name, lines = near[found]
                file.renamed(name)
                file.followed = file.followed.changed(lines)
                self._at_home(file, head)
                known.add(name)
            file.signature = None
            self._state.keep(file)

    def _candidate(self, name: str) -> list[str] | None:
        try:
            return files.read(self._repository.root, name)
        except OSError:
            return None

    # ------------------------------------------------------------ measuring

    def _commits(self, last: list[str | None] | None, head: Head, calls: list[Call]) -> list[tuple[str, float]]:
        """The commits that were made since the last look, with their times."""
        waiting = [call.at for call in calls if COMMIT not in call.measured]
        if head.commit is None or not waiting:
            return []
        commit, branch = last or (None, None)
        if commit is None:
            return self._repository.after(head.commit, min(waiting) - 1)
        found = [] if commit == head.commit else self._repository.since(head.commit, commit)
        tip = None if branch is None or branch == head.branch else self._repository.commit(branch)
        return found if tip in (None, commit) else [*self._repository.since(tip, commit), *found]

    def _measure(
        self, calls: list[Call], commits: list[tuple[str, float]], head: Head, now: float, blind: set[int]
    ) -> None:
        """Measure what is due. Of a call one of whose files cannot be read (`blind`) it is not known whether its lines stand: its horizons
        wait, and a commit is compared with what was last read.
        """
        touched, all_files = self._state.touched(), {file.number: file for file in self._state.files()}
        own = {call.number: [all_files[n] for n in touched.get(call.number, ()) if n in all_files] for call in calls}
        away = self._away(head)
        for commit, at in commits:
            open_calls = [call for call in calls if COMMIT not in call.measured and at >= int(call.at)]
            self._measure_commit(commit, open_calls, own, now)
        for call in calls:
            for name, horizon_s in HORIZONS_S.items():
                if name in call.measured or now < call.at + horizon_s:
                    continue
                if now > call.at + (1 + _LATE) * horizon_s:
                    self._state.measure(call, name, None, None)
                    continue
                if call.number in blind:
                    continue
                standing = [file.followed.kept | away(file) for file in own[call.number]]
                self._tell(call, name, _owned(call, standing), now)
            self._close(call, own[call.number], head, now)

    def _measure_commit(self, commit: str, calls: list[Call], own: dict[int, list[File]], now: float) -> None:
        """Measure the calls whose standing lines are all in this commit."""
        wanted = {file.number: file for call in calls for file in own[call.number]}
        if not wanted:
            return
        standing = self._standing(commit, wanted.values())
        for call in calls:
            committed = _owned(call, [standing[file.number] for file in own[call.number]])
            left = _owned(call, [file.followed.kept for file in own[call.number]]) - committed
            if committed and not left:
                self._tell(call, COMMIT, committed, now)

    def _standing(self, commit: str, wanted: Iterable[File]) -> dict[int, frozenset[int]]:
        """The line numbers that stand in a commit, by file number. Files are found under their present or former names."""
        names = {file.number: (file.path, *file.former) for file in wanted}
        contents = self._repository.contents(commit, (name for each in names.values() for name in each), files.LONGEST)
        standing: dict[int, frozenset[int]] = {}
        for file in wanted:
            data = next((contents[name] for name in names[file.number] if name in contents), None)
            lines = None if data is None else files.lines_of(data)
            standing[file.number] = frozenset() if lines is None else file.followed.standing(lines)
        return standing

    def _away(self, head: Head) -> Callable[[File], frozenset[int]]:
        """For lines that last stood on a branch that was left since and not merged: the numbers that stand at its tip."""
        tips: dict[str, str | None] = {}

        def tip_of(branch: str) -> str | None:
            if branch not in tips:
                tip = self._repository.commit(branch) if branch and branch != head.branch else None
                merged = tip is None or head.commit is None or self._repository.contains(head.commit, tip)
                tips[branch] = None if merged else tip
            return tips[branch]

        def standing(file: File) -> frozenset[int]:
            found: frozenset[int] = frozenset()
            for branch, (path, numbers) in file.homes.items():
                if not numbers or (tip := tip_of(branch)) is None:
                    continue
                contents = self._repository.contents(tip, [path], files.LONGEST)
                lines = files.lines_of(contents[path]) if path in contents else None
                found |= frozenset() if lines is None else numbers & file.followed.standing(lines)
            return found

        return standing

    def _close(self, call: Call, own: list[File], head: Head, now: float) -> None:
        """Finish a call after a day, with its committed lines, unless some still wait to be committed; after a week in any case."""
        if not set(HORIZONS_S) <= call.measured.keys():
            return
        if COMMIT not in call.measured and head.commit is not None:
            committed = _owned(call, self._standing(head.commit, own).values())
            waits = _owned(call, [file.followed.kept for file in own]) - committed
            went_on = bool(self._repository.after(head.commit, call.at))
            if went_on and (committed or not waits):
                self._tell(call, COMMIT, committed, now)
        if COMMIT in call.measured or now > call.at + _COMMIT_WAIT_S:
            self._state.finish(call)

    def _tell(self, call: Call, name: str, kept: frozenset[int], now: float) -> None:
        digest = hashlib.sha256(call.id.encode(errors="replace")).hexdigest()[:40]
        event = Event(
            target=call.id,
            name=name,
            value=len(kept) / call.written,
            source="code",
            comment=f"{len(kept)} of {call.written} lines",
            occurred_at=now,
            id=f"{name}-{digest}",  # the same for every sender and however often it is sent
            lines=_lines_kept(call, self._state.texts(call), kept),
        )
        self._state.measure(call, name, len(kept), event if _OUR_CALL.fullmatch(call.id) else None)

    def _tidy(self, now: float) -> None:
        """Stop following files in which no call waits for a measurement."""
        used = {number for numbers in self._state.touched().values() for number in numbers}
        for file in self._state.files():
            if file.number not in used:
                self._state.drop(file)
        self._state.forget(now - _REMEMBERED_S)


def spool_directory(repository: Repository) -> Path:
    """The directory that hooks and watcher share, below the working tree's own git directory."""
    return repository.directory / "ostinato"


def _lines_kept(call: Call, texts: list[Text], kept: frozenset[int]) -> list[dict[str, Any]] | None:
    """Which lines of a call's arguments survive; None unless all lines that it wrote are in them, and each argument was written once."""
    if sum(len(text.places) for text in texts) != call.written or len({text.argument for text in texts}) < len(texts):
        return None
    base = call.number * LINES_OF_A_CALL
    lines: list[dict[str, Any]] = [
        {
            "argument": text.argument,
            "of": text.lines,
            "followed": _ranges(text.places),
            "kept": _ranges(place for i, place in enumerate(text.places, base + text.first) if i in kept),
        }
        for text in texts
    ]
    return lines if max(len(each["followed"]) + len(each["kept"]) for each in lines) <= _LONGEST_RANGES else None


def _ranges(lines: Iterable[int]) -> str:
    """Ascending numbers as ranges. Example: ``_ranges([1, 2, 3, 7]) == "1-3, 7"``"""
    runs: list[list[int]] = []
    for line in lines:
        if runs and runs[-1][1] == line - 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)


def _is_due(call: Call, now: float) -> bool:
    return any(now >= call.at + horizon_s for name, horizon_s in HORIZONS_S.items() if name not in call.measured)


def _owned(call: Call, standing: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset(number for numbers in standing for number in numbers if call.owns(number))
