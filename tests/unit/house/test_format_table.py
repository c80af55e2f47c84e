"""The guide's table of stored formats has the code's numbers, and no format is missing from it."""

import re
from pathlib import Path

from ostinato.adapt import learner, older_states
from ostinato.app import machine
from ostinato.corpus import shards as corpus
from ostinato.record import backup, folds, person_cache
from ostinato.record import segment as segments
from ostinato.record.postgres import schema as postgres
from ostinato.release.auto import router
from ostinato.release.monitors import monitors
from ostinato.reward import log_fold
from ostinato.status import log_index as page
from ostinato.status import summary
from ostinato.train import checkpoint
from ostinato.weights.version import certificate
from ostinato.weights.version import manifest as weights

ROOT = Path(__file__).parents[3]

CHECKPOINTS = {checkpoint.FORMAT, checkpoint.SHARDED}
FORMATS = {
    "log: segments": (segments.FORMAT, segments.READABLE),
    "log in Postgres": (postgres.LAYOUT, {postgres.LAYOUT, *postgres._MIGRATIONS}),
    "backup of the log": (backup.FORMAT, {backup.FORMAT}),
    "folds": (folds._FORMAT, {folds._FORMAT}),
    "fold of rewards": (log_fold.FORMAT, {log_fold.FORMAT}),
    "fold of alarms": (monitors.FORMAT, {monitors.FORMAT}),
    "fold of Auto": (router._FORMAT, {router._FORMAT}),
    "fold of the status": (summary._FORMAT, {summary._FORMAT}),
    "page's index": (page.FORMAT, {page.FORMAT}),
    "people's dials": (person_cache.FORMAT, {person_cache.FORMAT}),
    "a person's state in `folds/people.sqlite`": (learner._FORMAT, {older_states.OLDER_FORMAT, learner._FORMAT}),
    "weights: manifests in `weights/objects`": (weights.FORMAT, {weights.FORMAT}),
    "certificate of an erasure": (certificate.FORMAT, {certificate.FORMAT}),
    "checkpoint of one process": (checkpoint.FORMAT, CHECKPOINTS),
    "checkpoint of several processes": (checkpoint.SHARDED, CHECKPOINTS),
    "corpus": (corpus.FORMAT, {corpus.FORMAT}),
    "measurements of the machine": (machine._FORMAT, {machine._FORMAT}),
}
UNNUMBERED = {"log: keys", "rollouts' journal", "settings"}


def table() -> dict[str, list[str]]:
    """The rows of the table by what they are about: the format, and what is read."""
    section = (ROOT / "docs" / "guide" / "running.md").read_text().partition("\n## Upgrade, and go back\n")[2]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].split(",")[0].strip(): [cell.strip() for cell in row[1:3]] for row in rows[1:]}


def test_the_table_has_the_codes_numbers():
    found = table()
    assert set(found) == FORMATS.keys() | UNNUMBERED
    for name, (written, read) in FORMATS.items():
        assert found[name][0] == f"`{written}`", name
        assert found[name][1] == ", ".join(f"`{each}`" for each in sorted(read, key=str)), name
    assert {found[name][0] for name in UNNUMBERED} == {"none"}


def test_every_format_in_the_code_is_in_the_table():
    named = re.compile(r"^(_?(?:FORMAT|LAYOUT|SHARDED))(?:: [^=\n]+)? = ", re.MULTILINE)
    source = ROOT / "src" / "ostinato"
    found = [path for path in source.rglob("*.py") for _ in named.findall(path.read_text())]
    assert len(found) == len(FORMATS), found
