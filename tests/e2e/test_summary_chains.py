"""Chains of windows through the real gateway, engine and trainer: summaries are turns behind their windows, and no bit differs."""

import asyncio
import random
import re
from dataclasses import replace

import httpx2
import numpy as np
import pytest
import torch
from benchmarks.worlds import summaries
from benchmarks.worlds.summaries import learn, newest, streams
from benchmarks.worlds.summaries_world import CONTEXT, Prompts, Stream, StreamReader, teach, tokenizer
from pydantic import SecretStr
from safetensors.torch import load_file
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.records import PolicyVersion, Purpose
from ostinato.core.weights import Snapshot
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.model.tensors import weights_of
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.log import MemoryLog
from ostinato.testing.serving import serving
from ostinato.testing.tiny_engine import tiny_engine
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.tasks.task import Grading
from ostinato.worlds.tasks.tasksets import taskset_of

KEY = "admin-0123456789abcdef"
FRAME = re.compile(r"=== memory: summary ===\n((?:[A-L][0-7]|-)+)\n=== end of summary ===")


def taught(path, seed, context):
    """A model that has seen a few lessons: some of its summaries have an end, some are refused."""
    assert context == CONTEXT
    teach(path, 1.0, most_steps=24, batch=32, seed=seed)
    return path


async def test_a_chain_of_windows_is_one_episode_that_engine_and_trainer_see_alike_to_the_bit(tmp_path):
    exact = contract(torch.float32, "exact", 1, block=16)
    log, reader = MemoryLog(), StreamReader()
    tasks = streams(3, 6, (2, 4)).tasks
    async with tiny_engine(tmp_path, context=CONTEXT, contract=exact, write=taught) as tiny:
        v0 = PolicyVersion(number=0, hash="0" * 64)
        await tiny.engine.load("world", Snapshot(policy=v0, weights=weights_of(tiny.model)))
        app = create_app(
            engine=tiny.engine,
            renderer=tiny.renderer,
            log=log,
            config=ServeConfig(),
            clock=lambda: 1.0,
            model_name="m",
            admin_keys=[SecretStr(KEY)],
        )
        async with serving(app) as url, WorldGateway(url, KEY) as gateway:
            models = [gateway.model(f"e{n}", group="g", harness=reader.hash, seed=100 * n) for n in range(len(tasks))]
            done = await asyncio.gather(
                *(reader.run(task, model, None) for task, model in zip(tasks, models, strict=True))
            )
        turns = log.turns()
        trainer = PolicyTrainer(tiny.path, TrainConfig(compute="fp32", publish="fp32"), exact)
    scored = trainer.score(turns)
    trainer.close()
    for turn, own in zip(turns, scored, strict=True):
        assert np.array_equal(np.float32(own).view(np.int32), np.float32(turn.logprobs).view(np.int32))
    assert all(turn.numerics == exact.id for turn in turns)

    by_id = {turn.id: turn for turn in turns}
    assert sum(rollout.effort["refused"] for rollout in done) > 0
    assert sum(rollout.effort["summaries"] for rollout in done) == sum(
        len(task.about["segments"].split()) for task in tasks
    )
    linked = 0
    for number, rollout in enumerate(done):
        chain = [by_id[turn] for turn in rollout.turns]
        assert {(turn.episode, turn.group, turn.harness) for turn in chain} == {(f"e{number}", "g", reader.hash)}
        assert [turn.purpose for turn in chain] == [Purpose.COMPACTION] * (len(chain) - 1) + [Purpose.TASK]
        assert {turn.id for turn in turns if turn.episode == f"e{number}"} == set(rollout.turns), (
            "nothing else was asked"
        )
        shown = [FRAME.fullmatch(message.text) for message in rollout.messages]
        bodies = [found[1] for found in shown if found]
        assert set(bodies) <= {turn.text for turn in chain[:-1]}
        linked += len(bodies)
    assert linked > 0, "some windows began with a summary"


def sent_to_messages(talk):
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": TRIGGER}}
    more = {"max_tokens": 12, "metadata": {"user_id": "ann"}, "context_management": {"edits": [edit]}}
    return "/v1/messages", {"model": "m", "messages": talk, **more}


def sent_to_responses(talk):
    wish = {"type": "compaction", "compact_threshold": TRIGGER}
    more = {"max_output_tokens": 12, "user": "ann", "store": True, "context_management": [wish]}
    return "/v1/responses", {"model": "m", "input": talk, **more}


def heard_from_messages(body):
    return [{"role": "assistant", "content": body["content"]}]


def heard_from_responses(body):
    return body["output"]


TRIGGER = 400
DIALECTS = {
    "messages": (sent_to_messages, heard_from_messages),
    "responses": (sent_to_responses, heard_from_responses),
}


async def talked(url, dialect, least):
    """A conversation of at least so many answers, whose client leaves it to the gateway when to summarise."""
    sent, heard = DIALECTS[dialect]
    talk = []
    async with httpx2.AsyncClient(base_url=url, timeout=WHOLE_PROGRAM_S) as http:
        for number in range(least):
            talk.append({"role": "user", "content": f"Question {number}, and what came before it?"})
            path, body = sent(talk)
            reply = await http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            talk += heard(reply.json())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("answers", [12, pytest.param(300, marks=pytest.mark.examination)])
async def test_calls_that_compact_are_seen_alike_by_engine_and_trainer_to_the_bit(dialect, answers, tmp_path):
    exact = contract(torch.float32, "exact", 1, block=16)
    log = MemoryLog()
    async with tiny_engine(tmp_path, context=2048, contract=exact) as tiny:
        app = create_app(
            engine=tiny.engine,
            renderer=tiny.renderer,
            log=log,
            config=ServeConfig(compaction_least_tokens=256),
            clock=lambda: 1.0,
            model_name="m",
        )
        async with serving(app) as url:
            await talked(url, dialect, answers)
        turns = log.turns()
        trainer = PolicyTrainer(tiny.path, TrainConfig(compute="fp32", publish="fp32"), exact)
    scored = trainer.score(turns)
    trainer.close()
    for turn, own in zip(turns, scored, strict=True):
        assert np.array_equal(np.float32(own).view(np.int32), np.float32(turn.logprobs).view(np.int32))
    begun = {turn.window.begins_with for turn in turns if turn.window is not None}
    assert len(begun) >= answers // 30 + 1
    assert begun <= {turn.id for turn in turns if turn.purpose is Purpose.COMPACTION}
    assert len({turn.episode for turn in turns}) == 1
    by_id = {turn.id: turn for turn in turns}
    for turn in (turn for turn in turns if turn.parent is not None):
        known = by_id[turn.parent].prompt_ids + by_id[turn.parent].sampled_ids
        assert turn.prompt_ids[: len(known)] == known


def test_the_prompts_of_the_imitation_are_those_of_the_renderer(tmp_path):
    teach(tmp_path, 1.0, most_steps=0)
    renderer, prompts = HFRenderer(tmp_path), Prompts(tokenizer())
    dice = random.Random(0)
    (task,) = streams(dice.randrange(99), 1).tasks
    goals, segments = task.messages[0].text, task.about["segments"].split()

    def rendered(*texts):
        messages = tuple(Message(role=Role.USER, text=text) for text in texts)
        return renderer.chat(Conversation(messages=messages))

    frame = "=== memory: summary ===\nA1B2\n=== end of summary ==="
    assert prompts.to_sum(goals, None, segments[0]) == rendered(goals, segments[0], ">")
    assert prompts.to_sum(goals, "A1B2", segments[1]) == rendered(goals, frame, segments[1], ">")
    assert prompts.to_sum(goals, "", segments[1]) == rendered(goals, "(nothing was kept)", segments[1], ">")
    assert prompts.to_ask(goals, "A1B2", "A") == rendered(goals, frame, "|A")


def test_the_rule_that_keeps_the_newest_tokens_guesses_what_it_lost():
    stream = Stream(goals="ABC", segments=("A1B2C3D4", "E5B6D7D0"), truth=(("A1", "B2", "C3"), ("A1", "B6", "C3")))
    guess = 1 - 1 / 8
    assert newest([stream], 2) == {"error": guess, "needle": guess, "state": guess, "tokens": 2}
    assert newest([stream], 4) == {"error": 2 * guess / 3, "needle": guess, "state": guess / 2, "tokens": 4}
    assert newest([stream], 8) == {"error": 0.0, "needle": 0.0, "state": 0.0, "tokens": 8}


async def test_a_step_learns_from_summaries_unless_they_are_left_out_and_no_bit_differs_from_the_engine(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(summaries, "GROUPS", 2)
    taught(tmp_path / "start", 0, CONTEXT)
    half = Grading(
        grader="pattern", data={"pattern": "[0-3]$"}
    )  # so that groups have contrast whatever the model knows
    tasks = taskset_of("streams", [replace(task, grading=half) for task in streams(3, 64, (2, 3)).tasks])
    found = {arm: await learn(tmp_path / "start", arm, 0, 2, 10.0, tmp_path / arm, tasks) for arm in ("all", "nosum")}
    assert {arm: told["steps"] for arm, told in found.items()} == {"all": 2, "nosum": 2}
    assert [told["differing"] for told in found.values()] == [0, 0]
    assert found["all"]["learned_from"]["compaction"] > found["all"]["learned_from"]["task"]
    assert found["nosum"]["learned_from"]["compaction"] == 0
    assert found["nosum"]["held"]["purpose"] > 0
    start, learned = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "all"))
    assert any(not torch.equal(start[name], learned[name]) for name in start)
