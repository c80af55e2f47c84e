"""A stranger's grammar is tried where it can do no harm: whatever ends, holds up or fills the compiler costs its own request only."""

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tokenizers import Tokenizer

from ostinato.core.conversation import Conversation, Demand, Message, Role
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.model import grammars as trials
from ostinato.model.grammars import COMPILE_S, GrammarTrial
from ostinato.model.renderer import HFRenderer
from ostinato.testing.tiny import tiny_model


def of(schema):
    return "start: %json " + json.dumps(schema)


def chain(length):
    """a0 -> a1 -> ... -> a string."""
    definitions = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": {"type": "string"}}}


ORDINARY = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
SLOW = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{20}}"} for i in range(20)]}
HARM = {"stack": chain(2_600), "time or memory": SLOW}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def patience(monkeypatch):
    """What is no fault of a grammar's has all the time that a busy machine takes; `hasty` is the limit that strangers have."""
    monkeypatch.setattr(trials, "COMPILE_S", WHOLE_PROGRAM_S)

    @contextlib.contextmanager
    def hasty():
        with monkeypatch.context() as patched:
            patched.setattr(trials, "COMPILE_S", COMPILE_S)
            yield

    return hasty


@pytest.fixture
def trial(model, patience):
    made = GrammarTrial(Tokenizer.from_file(str(model / "tokenizer.json")).to_str(), 260, [258])
    yield made
    made.close()


@pytest.mark.parametrize("schema", [ORDINARY, TREE, chain(100), {"enum": [f"value {i}" for i in range(4_000)]}])
def test_what_people_ask_for_passes(trial, schema):
    trial.check(of(schema))


def refused():
    return pytest.raises(BadRequest, match="cannot be enforced: its grammar takes more than 2 s or 64 MiB")


@pytest.mark.parametrize("harm", HARM)
def test_what_does_harm_is_refused_in_time_and_the_next_passes(trial, patience, harm, monkeypatch):
    trial.check(of(ORDINARY))
    began = time.monotonic()
    with patience(), refused():
        trial.check(of(HARM[harm]))
    assert time.monotonic() - began < PATIENT_S
    with monkeypatch.context() as patched, refused():
        patched.setattr(trial, "_tried", lambda grammar: pytest.fail("it is known by now"))
        trial.check(of(HARM[harm]))
    trial.check(of(TREE))


def test_what_is_no_grammar_is_told_as_it_is(trial):
    with pytest.raises(BadRequest, match="Unimplemented keys"):
        trial.check(of({"not": {}}))
    with pytest.raises(BadRequest, match="100000 at most"):
        trial.check("x" * 100_001)
    with pytest.raises(BadRequest, match="surrogate"):
        trial.check('start: "\ud800"')


def test_it_starts_again_when_its_process_was_killed(trial):
    trial.check(of(ORDINARY))
    os.kill(trial._process.pid, signal.SIGKILL)
    trial._process.wait()
    trial.check(of(TREE))


@pytest.mark.parametrize("schema", [TREE, {"enum": [f"value {i}" for i in range(4_000)]}])
def test_what_took_too_long_once_is_tried_again_later(trial, patience, monkeypatch, schema):
    trial.check(of(ORDINARY))
    os.kill(trial._process.pid, signal.SIGSTOP)  # a machine that stands still
    tasks = Path(f"/proc/{trial._process.pid}/task")
    while any(task.joinpath("stat").read_text().split()[2] != "T" for task in tasks.iterdir()):
        time.sleep(0.01)
    for _ in range(2):
        with patience(), pytest.raises(BadRequest, match="takes more than"):
            trial.check(of(schema))
    later = time.monotonic() + 61.0
    monkeypatch.setattr(trials.time, "monotonic", lambda: later)
    trial.check(of(schema))


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(trial, monkeypatch):
    monkeypatch.setattr(trials.sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="did not start"):
        trial.check(of(ORDINARY))
    monkeypatch.undo()
    trial.check(of(ORDINARY))


def test_its_process_ends_with_it(model, patience):
    made = GrammarTrial(Tokenizer.from_file(str(model / "tokenizer.json")).to_str(), 260, [258])
    made.check(of(ORDINARY))
    process = made._process.pid
    del made
    assert not Path(f"/proc/{process}").exists()


def test_threads_may_share_it(trial):
    failed = []

    def work(number):
        try:
            trial.check(of({**ORDINARY, "title": str(number)}))
        except BadRequest as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number % 5,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_renderer_tries_what_it_is_asked_for(model, patience):
    renderer = HFRenderer(model)
    asked = (Message(role=Role.USER, text="hi"),)
    fine, dear = (
        renderer.grammar(Conversation(messages=asked, demand=Demand(schema=each))) for each in (ORDINARY, SLOW)
    )
    assert not renderer.has_compiled(fine)
    renderer.compile(fine)
    assert renderer.has_compiled(fine)
    with patience(), pytest.raises(BadRequest, match="takes more than"):
        renderer.compile(dear)
    assert not renderer.has_compiled(dear)
