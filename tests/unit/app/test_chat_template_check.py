"""What is told of a model at the start: that it has no chat template (an alarm where plain prompts remain, a refusal where rollouts must
chat), and that its context is too short for conversations to be summarised within a call.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ostinato.app.gateway import NO_CHAT, check_chat, check_window
from ostinato.core.errors import BadConfig
from ostinato.core.notices import Alarm, AlarmState
from ostinato.model.renderer import HFRenderer
from ostinato.serve.config import ServeConfig
from ostinato.testing.log import MemoryLog
from ostinato.testing.tiny import tiny_model


def run_of(source):
    return SimpleNamespace(log=MemoryLog(), config=SimpleNamespace(learn=SimpleNamespace(source=source)))


def alarms(run):
    return [(row.name, row.state) for row in run.log.rows if isinstance(row, Alarm)]


async def test_it_is_an_alarm_until_the_template_is_there(tmp_path):
    path, run = tiny_model(tmp_path / "m", layers=1), run_of("people")
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").unlink()
    for _ in range(2):
        await check_chat(run, HFRenderer(path), path)
    assert alarms(run) == [(NO_CHAT, AlarmState.RAISED)]
    assert "chat_template.jinja" in run.log.rows[0].reason
    (path / "chat_template.jinja").write_text(template)
    await check_chat(run, HFRenderer(path), path)
    assert alarms(run)[-1] == (NO_CHAT, AlarmState.CLEARED)


@pytest.mark.parametrize("source", ["worlds", "both"])
async def test_rollouts_that_must_chat_are_refused(source):
    with pytest.raises(BadConfig, match=r"chat_template\.jinja.*learn\.source"):
        await check_chat(run_of(source), SimpleNamespace(chats=False), Path("m"))


@pytest.mark.parametrize("source", ["people", "worlds", "both"])
async def test_a_model_that_chats_raises_nothing(source):
    run = run_of(source)
    await check_chat(run, SimpleNamespace(chats=True), Path("m"))
    assert alarms(run) == []


@pytest.mark.parametrize(("context", "share", "warns"), [(1_024, 0.75, True), (8_192, 0.75, False), (4_096, 0.3, True)])
def test_a_context_too_short_for_summaries_within_a_call_is_told(context, share, warns, caplog):
    check_window(ServeConfig(compaction_share=share), context)
    assert ("serve.compaction_share" in caplog.text) == warns
