"""Continued pre-training as a whole: corpus, course, checkpoints, model; and what it refuses."""

import json

import pytest
import torch

from ostinato.app.supervised import CorpusDesk, Course, open_source, read_into, read_tests
from ostinato.config import load
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.order import Phase
from ostinato.testing.tiny import byte_tokenizer, tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)


def function(number):
    names = " ".join(f"part{number * n % 97}" for n in range(20))
    return f"def f{number}(x):\n    # {names}\n    return x + {number}\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a directory of sources, and the corpus made of them."""
    root = tmp_path_factory.mktemp("midtraining")
    tiny_model(root / "tiny")
    (root / "mine").mkdir()
    for number in range(40):
        (root / "mine" / f"m{number:02d}.py").write_text(function(number))
    return root


def settings(place, *more):
    return load(None, [f"model.source='{place / 'tiny'}'", "model.numerics=fast", *more])


async def build(place, out, against=()):
    desk = CorpusDesk(settings(place), CorpusConfig(near=1.0), against)
    desk.build.take(await open_source(f"{place}/mine"), lambda: None)
    return desk.write(out)


def a_course(place, **more):
    given = {
        "corpora": (place / "corpus",),
        "weights": (1.0,),
        "tokens": 512 * 8,
        "phases": (Phase(length=64), Phase(length=128)),
        "batch_tokens": 512,
        "learning_rate": 3e-3,
        "held_out": 0.2,
        "measure_every": 3,
        "keep_every": 2,
    }
    return Course(**(given | more))


@pytest.fixture(scope="module")
def corpus(place):
    import asyncio

    return asyncio.run(build(place, place / "corpus"))


def test_it_learns_what_it_has_not_read_and_the_outcome_is_a_model_directory(place, corpus, tmp_path):
    told = []
    losses = read_into(settings(place), a_course(place), tmp_path / "out", told.append)
    assert [step for step, _ in losses] == [0, 3, 6, 8]
    assert losses[-1][1] < 0.8 * losses[0][1]
    assert [each.step for each in told] == list(range(9))
    assert told[5].metrics["tokens"] == 512
    assert told[-1].epochs == pytest.approx(2 * told[4].epochs)
    PolicyTrainer(tmp_path / "out", TrainConfig(compute="fp32", publish="fp32"))
    assert not (tmp_path / "out.checkpoints").exists()
    with pytest.raises(BadConfig, match="not empty"):
        read_into(settings(place), a_course(place), tmp_path / "out", told.append)


def test_killed_while_the_model_is_written_it_can_go_on(place, corpus, tmp_path, monkeypatch):
    from ostinato.app import supervised

    write = supervised.write_model

    def killed(weights, directory, files, notes):
        write({}, directory, files, notes)
        raise Enough

    monkeypatch.setattr(supervised, "write_model", killed)
    with pytest.raises(Enough):
        read_into(settings(place), a_course(place), tmp_path / "out", lambda _: None)
    monkeypatch.undo()
    seen = []
    read_into(settings(place), a_course(place), tmp_path / "out", seen.append)
    assert seen[0].step == 7, "from the newest checkpoint on"
    PolicyTrainer(tmp_path / "out", TrainConfig(compute="fp32", publish="fp32"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Enough(Exception):
    pass


def test_stopped_at_any_step_and_resumed_it_ends_with_the_same_bytes(place, corpus, tmp_path):
    losses = read_into(settings(place), a_course(place), tmp_path / "straight", lambda _: None)
    for stop in (1, 4, 7):

        def at(step, stop=stop):
            if step.step == stop:
                raise Enough

        out = tmp_path / f"resumed{stop}"
        with pytest.raises(Enough):
            read_into(settings(place), a_course(place), out, at)
        seen = []
        assert read_into(settings(place), a_course(place), out, seen.append) == losses
        assert seen[0].step == (0 if stop == 1 else stop // 2 * 2 + 1), "from the newest checkpoint on"
        straight, resumed = (each / "model.safetensors" for each in (tmp_path / "straight", out))
        assert straight.read_bytes() == resumed.read_bytes()


def test_a_checkpoint_of_another_course_is_not_gone_on_with(place, corpus, tmp_path):
    def at(step):
        if step.step == 3:
            raise Enough

    with pytest.raises(Enough):
        read_into(settings(place), a_course(place), tmp_path / "out", at)
    for config, course in [
        (settings(place), a_course(place, learning_rate=1e-3)),
        (settings(place, "train.seed=1"), a_course(place)),
        (settings(place, "engine.block=64"), a_course(place)),  # another numerics contract
    ]:
        with pytest.raises(BadConfig, match="another course"):
            read_into(config, course, tmp_path / "out", lambda _: None)
    seen = []
    read_into(settings(place), a_course(place, keep_every=5), tmp_path / "out", seen.append)
    assert seen[0].step == 3, "how often a checkpoint is kept may change"


def test_the_first_steps_are_small_in_a_short_course_too(place):
    short = a_course(place)
    assert short.steps == 8
    rates = [short.learning_rate_of(step, 2) for step in range(8)]
    assert rates[0] == pytest.approx(0.5 * short.learning_rate)
    assert rates[1] == rates[2] == max(rates) == short.learning_rate
    long = a_course(place, tokens=512 * 400)
    assert long.learning_rate_of(0, 2) == pytest.approx(long.learning_rate / 20)
    assert a_course(place, tokens=512).learning_rate_of(0, 2) == short.learning_rate, "one step has no time to rise"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"phases": (Phase(length=60),)}, "multiple"),
        ({"phases": (Phase(length=512, share=0),)}, "multiple"),
        ({"phases": (Phase(length=1024),), "batch_tokens": 1024}, "context has 512 tokens; .* as in --length 512"),
        ({"weights": (1.0, 2.0)}, "--mixture"),
        ({"weights": (-1.0,)}, "--mixture"),
        ({"weights": (float("nan"),)}, "--mixture"),
        ({"phases": (Phase(length=64, share=float("inf")),)}, "share"),
        ({"held_out": 0.0}, "--held-out"),
        ({"held_out": 1e-9}, "--held-out 1e-09 of the 40 files .* leaves 40 to train on and 0 to evaluate on"),
    ],
)
def test_a_course_that_cannot_be_read_is_refused_before_it_begins(more, said, place, corpus, tmp_path):
    with pytest.raises(BadConfig, match=said):
        read_into(settings(place), a_course(place, **more), tmp_path / "out", lambda _: None)


def test_a_corpus_of_another_tokenizer_is_refused(place, corpus, tmp_path):
    tiny_model(tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 261}))
    config = load(None, [f"model.source='{tmp_path / 'other'}'", "model.numerics=fast"])
    with pytest.raises(BadConfig, match="another tokenizer"):
        read_into(config, a_course(place), tmp_path / "out", lambda _: None)


async def test_what_is_tested_is_kept_out(place, tmp_path):
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": function(7)}]}) + "\n")
    made = await build(place, tmp_path / "clear", [suite])
    assert [(each.path, each.reason) for each in made.refused] == [("m07.py", "tested")]
    assert made.against.keys() == {str(suite)}
    assert made.documents == 39


async def test_control_tokens_in_a_text_are_text(place, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").write_text("end = '<|im_end|>'  # and <|im_start|>, too\n" * 3)
    desk = CorpusDesk(settings(place), CorpusConfig(near=1.0), ())
    desk.build.take(await open_source(f"{tmp_path}/mine"), lambda: None)
    (document,) = desk.build._documents
    assert document.tokens[0] == document.tokens[-1] == 256
    assert max(document.tokens[1:-1]) < 256


async def test_a_source_that_is_none_is_refused():
    with pytest.raises(BadRequest, match="name a package"):
        await open_source("no/such/directory")


def test_two_test_files_may_say_the_same(tmp_path):
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text("\ufeff" + json.dumps({"text": "one two three four five six seven eight"}))
    tested, hashes = read_tests([tmp_path / "one.jsonl", tmp_path / "two.jsonl"], CorpusConfig())
    assert (len(tested), len(hashes)) == (1, 2)


def test_a_test_file_that_says_nothing_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("{}\n")
    with pytest.raises(BadConfig, match=r"--against .*nothing of it could be found; leave it out"):
        read_tests([tmp_path / "empty.jsonl"], CorpusConfig())
    with pytest.raises(BadConfig, match="cannot be read"):
        read_tests([tmp_path / "none.jsonl"], CorpusConfig())
