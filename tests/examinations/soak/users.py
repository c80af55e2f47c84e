"""Simulated users who record what the gateway acknowledged."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LIKED = re.compile("^[a-z]")
SAMPLING = {"max_tokens": 6, "temperature": 1.0}
SILENT = 0.3  # share of turns without feedback


@dataclass
class Told:
    """The acknowledged turns and signals. A turn maps to the received text."""

    turns: dict[str, str] = field(default_factory=dict)
    signals: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)  # by status or error


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {number % 7}"}]


def customer(url: str, key: str) -> aiohttp.ClientSession:
    """A client of the gateway, with this key unless that is empty."""
    headers = {"x-api-key": key} if key else {}
    return aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(total=30))


async def user(name: str, url: str, told: Told, until: asyncio.Event, pause_s: float, key: str = "") -> None:
    """Ask, react and wait, and continue after any failure."""
    dice, number = random.Random(name), 0
    async with customer(url, key) as session:
        while not until.is_set():
            number += 1
            try:
                await _ask(session, name, number, told, dice)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                told.refused[type(error).__name__] += 1
                await asyncio.sleep(1.0)
            await asyncio.sleep(dice.uniform(0, 2 * pause_s))


async def _ask(session: aiohttp.ClientSession, name: str, number: int, told: Told, dice: random.Random) -> None:
    body = {"model": "tiny", "user": name, "messages": messages(number), **SAMPLING}
    headers = {"Idempotency-Key": f"{name}-{number}"}
    reply = await _post(session, "/v1/chat/completions", body, told, headers)
    if reply is None:
        return
    text, turn = reply["choices"][0]["message"]["content"] or "", reply["ostinato"]["turns"][0]
    told.turns[turn] = text
    if dice.random() < SILENT:
        return
    said = "accepted" if LIKED.search(text) else "rejected"
    event = {"id": f"{name}-{number}", "target": turn, "name": said, "value": True, "source": "human"}
    for _ in range(1 + number % 2):  # every other event is sent twice
        if await _post(session, "/v1/feedback", event, told) is not None:
            told.signals.add(event["id"])


async def _post(
    session: aiohttp.ClientSession, path: str, body: Any, told: Told, headers: dict[str, str] | None = None
) -> Any:
    async with session.post(path, json=body, headers=headers) as response:
        if response.status in (200, 202):
            return await response.json()
        told.refused[str(response.status)] += 1
        await response.read()
        await asyncio.sleep(1.0)
        return None


async def flood(url: str, count: int, told: Told, key: str = "") -> None:
    """Send feedback about turns that were never served."""
    async with customer(url, key) as session:
        for start in range(0, count, 500):
            events = [
                {
                    "id": f"orphan-{random.getrandbits(64):x}-{number}",
                    "target": f"chatcmpl-{random.getrandbits(128):032x}:0",
                    "name": "accepted",
                    "value": True,
                    "source": "human",
                    "comment": "x" * 200,
                }
                for number in range(start, start + 500)
            ]
            try:
                await _post(session, "/v1/feedback", events, told)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                told.refused[type(error).__name__] += 1
