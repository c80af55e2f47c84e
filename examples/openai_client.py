"""Streaming chat with the official OpenAI client, and what the person did with the answers.

Run `ostinato up`, then `python examples/openai_client.py`. Needs `pip install openai ostinato-client`.
OSTINATO_URL and OSTINATO_API_KEY name another server and your key.
"""

import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from ostinato_client import Ostinato

URL = os.environ.get("OSTINATO_URL", "http://127.0.0.1:8321")
KEY = os.environ.get("OSTINATO_API_KEY")
USER = "anna"  # your product's name for the person: releases, caps and statistics are per user

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY or "none")
model = next(iter(client.models.list())).id


def ask(messages: list[ChatCompletionMessageParam]) -> tuple[str, str]:
    """Print an answer as it comes; returns its id, which feedback names, and its text."""
    answer, text = "", ""
    for chunk in client.chat.completions.create(model=model, messages=messages, user=USER, max_tokens=60, stream=True):
        answer = chunk.id
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            text += piece
            print(piece, end="", flush=True)
    print(f"\n[{answer}]")
    return answer, text


with Ostinato(URL, KEY) as signals:
    chat: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Write a subject line for a sale of lamps."}]
    first, text = ask(chat)
    signals.feedback(first, "accepted", True)  # on the server's disk when this returns

    chat.append({"role": "assistant", "content": text})
    chat.append({"role": "user", "content": "Shorter."})
    second, text = ask(chat)  # the same episode: the gateway recognises the conversation
    signals.enqueue(first, "followed_up", True)  # returns at once; sent in the background

    # the person put it to use, took it back, and wrote something else
    signals.feedback(second, "accepted", True)
    signals.feedback(second, "undone", True, correction="Lamps: 30% off")
