"""A model that follows a script."""

import asyncio
import json

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.records import Purpose
from ostinato.worlds.harness.rollout import ModelAnswer, OutOfTime


def says(text="", *calls, finish="stop", tokens=10):
    return text, calls, finish, tokens


class ScriptedModel:
    """Implements `Model`: gives the scripted answers. A scripted exception is raised; None lets the remaining time pass.

    `bytes_a_token`: how a prompt's tokens are counted; None: there are always five.
    """

    def __init__(self, *script, draw=None, bytes_a_token=None):
        self.script, self.asked, self.budgets, self.left = list(script), [], [], []
        self.draw, self.bytes_a_token, self.purposes = draw, bytes_a_token, []

    async def ask(self, messages, tools=(), *, max_tokens, stop=(), left_s=None, purpose=Purpose.TASK):
        self.purposes.append(purpose)
        self.left.append(left_s)
        self.asked.append(tuple(messages))
        self.budgets.append(max_tokens)
        number = len(self.asked) - 1
        scripted = self.script[number]
        if scripted is None:
            await asyncio.sleep(left_s)
            raise OutOfTime("nothing was said")
        if isinstance(scripted, Exception):
            raise scripted
        text, wanted, finish, tokens = scripted
        calls = tuple(
            ToolCall(
                id=f"call_{number}_{place}", name=name, arguments=given if isinstance(given, str) else json.dumps(given)
            )
            for place, (name, given) in enumerate(wanted)
        )
        said = Message(role=Role.ASSISTANT, text=text, calls=calls)
        each = self.bytes_a_token
        shown = [message.text for message in messages] + [
            f"{tool.name}{tool.description}{tool.parameters}" for tool in tools
        ]
        prompt = sum(len(text.encode()) for text in shown) // each if each else 5
        return ModelAnswer(turn=f"t{number}:0", message=said, finish=finish, prompt_tokens=prompt, tokens=tokens)
