"""What the learning examination demonstrates is written by its scripts through the harness, in a sandbox, as the model will work."""

import json

from tests.examinations.learning import tool_world

from ostinato.worlds.sandbox import Boxes


async def test_a_scripted_answer_is_a_demonstration_of_the_tool():
    boxes = Boxes()
    lines = await tool_world.demonstrations(boxes, 2)
    await boxes.close()
    for line in lines:
        shown = json.loads(line)
        roles = [message["role"] for message in shown["messages"]]
        assert {"user", "assistant", "tool"} <= set(roles)
        assert "python" in [tool["function"]["name"] for tool in shown["tools"]]
    assert len(lines) == 2
