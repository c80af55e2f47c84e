"""An agent's loop without a framework: tools, one episode for all its calls, and a reward by tests of the outcome.

Run `ostinato up --set reward.function=ostinato.reward.functions:agent`, then `python examples/tool_agent.py`.
Needs `pip install openai ostinato-client`, and a model that calls tools: smollm2 only talks.
"""

import json
import os
import uuid
from collections.abc import Callable
from typing import Any

from openai import OpenAI

from ostinato_client import Ostinato

URL, KEY = os.environ.get("OSTINATO_URL", "http://127.0.0.1:8321"), os.environ.get("OSTINATO_API_KEY")
ORDERS = {"a1": {"item": "chair", "state": "sent"}, "a2": {"item": "lamp", "state": "sent"}}


def refund(order: str) -> str:
    """Refund an order."""
    ORDERS[order]["state"] = "refunded"
    return f"{order} is refunded"


TOOLS: dict[str, Callable[..., str]] = {"list_orders": lambda: json.dumps(ORDERS), "refund": refund}
ORDER = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
OFFERED: list[Any] = [
    {"type": "function", "function": {"name": "list_orders", "description": "List the customer's orders."}},
    {"type": "function", "function": {"name": "refund", "description": "Refund an order.", "parameters": ORDER}},
]


def run(call: Any) -> dict[str, str]:
    """The tool's message: what the call gave, or what was wrong with it, so that the model can try again."""
    try:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
    except (KeyError, TypeError, ValueError) as error:
        result = f"error: {error!r}"
    return {"role": "tool", "tool_call_id": call.id, "content": result}


episode = {"X-Ostinato-Episode": uuid.uuid4().hex}  # one for each task
client = OpenAI(base_url=f"{URL}/v1", api_key=KEY or "none", default_headers=episode)
model = next(iter(client.models.list())).id
messages: list[Any] = [{"role": "user", "content": "My lamp arrived broken. I want my money back."}]
answer = ""
for _ in range(8):
    said = client.chat.completions.create(model=model, messages=messages, tools=OFFERED, user="anna", max_tokens=200)
    answer, message = said.id, said.choices[0].message
    calls = [call for call in message.tool_calls or [] if call.type == "function"]
    print(message.content or "", *(f"{call.function.name}({call.function.arguments})" for call in calls))
    messages += [message, *map(run, calls)]
    if not calls:
        break

passed = [order["state"] for order in ORDERS.values()] == ["sent", "refunded"]
verdict = "tests_passed" if passed else "tests_failed"
Ostinato(URL, KEY).feedback(answer, verdict, True, source="code")  # the episode's earlier turns get their share of it
