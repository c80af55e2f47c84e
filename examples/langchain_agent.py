"""A LangChain agent with one tool, on your own model, and a person's verdict on its answer.

Run `ostinato up`, then `python examples/langchain_agent.py`. Needs `pip install langchain langchain-openai ostinato-client`,
and a model that calls tools: smollm2 only talks.
"""

import os
import uuid

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from ostinato_client import Ostinato

URL = os.environ.get("OSTINATO_URL", "http://127.0.0.1:8321")
KEY = os.environ.get("OSTINATO_API_KEY")


@tool
def opening_hours(day: str) -> str:
    """The shop's opening hours on a day of the week."""
    return "closed" if day.lower() == "sunday" else "9:00 to 18:00"


model = ChatOpenAI(
    model=os.environ.get("OSTINATO_MODEL", "smollm2"),
    base_url=f"{URL}/v1",
    api_key=KEY or "none",
    max_completion_tokens=200,
    model_kwargs={"user": "anna"},
    default_headers={"X-Ostinato-Episode": uuid.uuid4().hex},  # all calls of this task are one episode
)
agent = create_agent(model, tools=[opening_hours], system_prompt="You answer for a shop. Look things up.")
result = agent.invoke({"messages": [{"role": "user", "content": "Can I come by on Sunday?"}]})
last = result["messages"][-1]
print(last.text)

with Ostinato(URL, KEY) as signals:
    signals.feedback(last.response_metadata["id"], "accepted", True)
