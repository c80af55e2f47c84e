"""What `ostinato log` prints is one line a row and no command to a terminal, whatever names a row carries."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.errors import NotFound
from ostinato.core.records import Consent, ConsentGiven, Quarantine, Reward
from ostinato.launch.commands.log import consent, line, print_log
from ostinato.testing.records import a_signal, a_turn

FORGED = "ann\nsignal     chatcmpl-9:0  rejected=1\r\x1b[2J\x9b1A\u2028\u202e"


@pytest.mark.parametrize(
    "row",
    [
        a_turn(user=FORGED),
        a_turn(FORGED),
        replace(a_turn(), text=FORGED),
        a_signal(a_turn(), id=FORGED),
        ConsentGiven(id="c", tenant="acme", user=FORGED, level=Consent.NEVER, at=1.0),
        Quarantine(turn="t:0", reason=f"reward_failed: ValueError: {FORGED}", at=1.0),
    ],
)
def test_no_name_breaks_its_line(row):
    said = line(row)
    assert said.isprintable(), said
    assert "\\x1b[2J" in said, "it is shown, spelled out"
    assert "ann" in line(a_turn(user="ann"))


def test_letters_of_every_script_stay_as_they_are():
    assert "Jürgen 陳 🎻" in line(a_turn(user="Jürgen 陳 🎻"))


async def test_an_agents_reward_is_shown_with_its_parts(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}", "reward.options={tests=0.75}"])
    turn = a_turn("chatcmpl-3f:0")
    kept, passed = a_signal(turn, "lines_kept_1h", value=0.75), a_signal(turn, "tests_passed", at=12.0)
    reward = Reward(turn=turn.id, value=1.0, function="agent@2", signals=(kept.id, passed.id), at=7210.0)
    other = a_turn("chatcmpl-40:0")
    plain_reward = Reward(turn=other.id, value=0.75, function="copilot@1", signals=(), at=7210.0)
    with open_log(config) as log:
        await log.append(turn, kept, passed, reward, other, plain_reward)
    seen = io.StringIO()
    await print_log(config, "rewards", 2, Console(file=seen, width=140))
    first, second = seen.getvalue().splitlines()
    assert first.endswith("chatcmpl-3f:0  +1.000  agent@2  from 2 signals: kept lines +0.25, tests +0.75")
    assert second.endswith("chatcmpl-40:0  +0.750  copilot@1  from 0 signals")
    assert line(replace(reward, signals=(kept.id,))).endswith("from 1 signal")


async def test_what_a_person_allows_is_shown_and_recorded(tmp_path):
    keys = "serve.api_keys=['acme:sk-0123456789abcdef']"
    config = load(None, [f"run.directory={tmp_path / 'run'}", "privacy.train=adapt", keys])
    with open_log(config):
        pass
    seen = io.StringIO()
    for user, level in (("ann", None), ("ann", Consent.NEVER), ("bob", None), (FORGED, None), ("ann", Consent.YES)):
        await consent(config, "acme", user, level, Console(file=seen, width=140))
    first, second, third, forged, last = seen.getvalue().splitlines()
    assert first == "ann of acme: yes; what counts with the operator's settings: adapt"
    assert second == "ann of acme: never; what counts with the operator's settings: never"
    assert (third.split(";")[0], last.split(";")[0]) == ("bob of acme: yes", "ann of acme: yes")
    assert forged.isprintable()
    with open_log(config) as log:
        rows = [row async for _, row in log.read(0, {ConsentGiven})]
    assert [(row.user, row.level) for row in rows] == [("ann", Consent.NEVER), ("ann", Consent.YES)]
    assert (tmp_path / "run" / "audit.jsonl").read_text().count('"consent"') == 2


@pytest.mark.parametrize("level", [None, Consent.NEVER])
async def test_a_persons_choice_for_a_tenant_without_a_key_is_refused_by_name(tmp_path, level):
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("bolt:sk-fedcba9876543210\n")
    keys = ["serve.api_keys=['acme:sk-0123456789abcdef']", f"serve.api_keys_file='{file}'"]
    run = f"run.directory={tmp_path / 'run'}"
    with open_log(load(None, [run])):
        pass
    said = io.StringIO()
    for given, tenant, known in ((keys, "amce", "acme, bolt, default"), ([], "acme", "default")):
        with pytest.raises(NotFound, match=rf"tenant '{tenant}'; known are {known}\."):
            await consent(load(None, [run, *given]), tenant, "ann", level, Console(file=said))
    with open_log(load(None, [run])) as log:
        assert [row async for _, row in log.read(0, {ConsentGiven})] == []
    assert not (tmp_path / "run" / "audit.jsonl").exists()
    for given, tenant in ((keys, "acme"), (keys, "bolt"), (keys, "default"), ([], "default")):
        await consent(load(None, [run, *given]), tenant, "ann", level, Console(file=said))
    assert len(said.getvalue().splitlines()) == 4
