"""People and a world at one gateway on the tiny model, compared by the commands: the same questions are known again, a tell is caught."""

import pytest
from tests.examinations.fidelity.run import PHASES, Sizes, examine


@pytest.mark.examination
async def test_the_same_questions_of_people_and_of_a_world_are_compared(tmp_path):
    sizes = Sizes(people=48, asks=2, tries=2, at_once=8, every=8)
    phases = [phase for phase in PHASES if phase.name in ("shipped", "planted")]
    rows = await examine("tiny", sizes, 0, tmp_path, phases)
    assert [row["phase"] for row in rows] == ["shipped", "shipped", "planted", "planted"]
    mixed, same, _, tell = rows
    assert mixed["production"] == [96, 48]
    assert mixed["prompts"] is None
    assert same["prompts"]["shared"] >= 10
    assert same["production"][0] + same["prompts"]["left_out"][0] == 96
    coins = {each["auc"] for each in same["tells"] if each["name"].startswith(("user.", "assistant.", "prompt."))}
    assert coins <= {0.5}, "what follows from the prompt alone"
    assert tell["auc"] == 1.0
    assert any("system.word:Emit" in each["name"] for each in tell["tells"])
