"""What is done to logits before a token is drawn: one definition for the sampler and the trainer."""

import json
import time

import numpy as np
import pytest
import torch

from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling
from ostinato.engine.embedded.sampler import Draw, draw
from ostinato.model.logit_edits import LogitEditor, edit_logits
from ostinato.model.renderer import HFRenderer
from ostinato.testing.tiny import tiny_model

STOP = 258


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return HFRenderer(tiny_model(tmp_path_factory.mktemp("tiny")))


def allowed(edit, vocab=260):
    return {*np.flatnonzero(np.unpackbits(edit.allowed, count=vocab, bitorder="little")).tolist()}


def test_penalties_are_openais_formula_over_the_answer_so_far():
    editor = LogitEditor(
        Sampling(max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((1, 2.0),)), None
    )
    for token in (1, 3, 3):
        editor.take(token)
    logits = torch.zeros(2, 5)
    edit_logits(logits, {1: editor.edit()})
    assert logits.tolist() == [[0.0] * 5, [0.0, 2.0 - 0.5 - 0.25, 0.0, -0.5 - 2 * 0.25, 0.0]]


def test_sampling_that_edits_nothing_has_no_editor():
    assert LogitEditor.of(Sampling(max_tokens=9, temperature=0.5, top_p=0.5, stop=("x",)), None) is None


def test_a_copy_goes_its_own_way(renderer):
    editor = LogitEditor.of(
        Sampling(max_tokens=9, grammar='start: "ab" | "ac"', presence_penalty=1.0), renderer.grammars
    )
    editor.take(*renderer.encode("a"))
    copy = editor.copy()
    copy.take(*renderer.encode("b"))
    assert allowed(editor.edit()) == {*renderer.encode("b"), *renderer.encode("c")}
    assert allowed(copy.edit()) == {STOP}
    assert len(editor.edit().ids) == 1
    assert len(copy.edit().ids) == 2


def test_only_what_the_grammar_allows_is_drawn_and_its_logprob_is_under_the_mask(renderer):
    editor = LogitEditor.of(Sampling(max_tokens=9, grammar='start: "yes" | "no"'), renderer.grammars)
    yes, no = renderer.encode("y")[0], renderer.encode("n")[0]
    logits = torch.randn(400, 260, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = [Draw(temperature=0.7, top_p=1.0, u=i / 400, edit=editor.edit()) for i in range(400)]
    want = torch.log_softmax(logits[:, [yes, no]].float() / 0.7, -1)
    drawn = draw(logits, rows)
    assert {*drawn.tokens} == {yes, no}
    found = torch.tensor(drawn.logprobs)
    picked = want.gather(1, torch.tensor([[yes, no].index(token) for token in drawn.tokens])[:, None])[:, 0]
    torch.testing.assert_close(found, picked, atol=1e-5, rtol=0)
    assert all(drawn.sound)


def test_an_answer_may_end_only_where_the_grammar_is_satisfied(renderer):
    editor = LogitEditor.of(Sampling(max_tokens=9, grammar='start: "a" "b"?'), renderer.grammars)
    assert allowed(editor.edit()) == {*renderer.encode("a")}
    editor.take(*renderer.encode("a"))
    assert allowed(editor.edit()) == {*renderer.encode("b"), STOP}
    assert editor.take(renderer.encode("x")[0])  # says why


@pytest.mark.parametrize(
    "grammar",
    [
        "no grammar",
        'start: %json {"type": "objec"}',
        'start: %json {"$ref": "http://elsewhere/schema"}',
        'start: %json {"unevaluatedProperties": false}',
        f"start: %json {json.dumps({'properties': {'a': {'pattern': '(('}}})}",
        'start: "\ud800"',
        'start: "' + "a" * (1 << 20) + '"',
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused_with_the_reason(renderer, grammar):
    with pytest.raises(BadRequest) as caught:
        renderer.grammars.matcher(grammar)
    assert 20 < len(str(caught.value)) < 700


KEYS = [f"k{i}" for i in range(30)]
HOSTILE = {
    "pattern": {"type": "string", "pattern": "^(a|aa|aaa)*(a?){60}b(.*x.{30}){9}$"},
    "alternatives": {
        "anyOf": [
            {"type": "object", "properties": {k: {"type": "string"} for k in KEYS}, "required": [f"k{i}"]}
            for i in range(75)
        ]
    },
    "names": {"type": "object", "properties": {f"p{i}": {"pattern": f"^a{{{i % 50}}}b*$"} for i in range(1500)}},
    "choices": {"enum": [f"value number {i}" for i in range(4000)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_take_too_long_is_refused_or_ends(renderer, name):
    """No stream of others may wait long for one token's mask."""
    sampling, slowest = Sampling(max_tokens=9, grammar=f"start: %json {json.dumps(HOSTILE[name])}"), 0.0
    try:
        editor = LogitEditor.of(sampling, renderer.grammars)
    except BadRequest:
        return
    for token in renderer.encode('{"k1": "a", "k2": "b", "k3'):
        began = time.thread_time()
        editor.edit()
        slowest = max(slowest, time.thread_time() - began)
        if editor.take(token):
            break
    assert slowest < 0.3


def test_an_answer_whose_grammar_gives_up_does_not_end_well(renderer):
    """In its error state the matcher allows the end alone."""
    editor = LogitEditor.of(Sampling(max_tokens=9, grammar='start: "ab"'), renderer.grammars)
    assert editor.take(*renderer.encode("x"))
    assert allowed(editor.edit()) == {STOP}
    assert editor.take(STOP)


@pytest.mark.parametrize(
    ("answer", "whole"), [("yes", True), ("no", True), ("ye", False), ("yess", False), ("", False)]
)
def test_an_answer_that_is_over_fulfils_its_grammar_or_not(renderer, answer, whole):
    for end in ([STOP], []):
        assert renderer.fulfils('start: "yes" | "no"', [*renderer.encode(answer), *end]) is whole
    assert renderer.fulfils('start: "yes" | "no"', [*renderer.encode("yes"), STOP]), "one broken answer ends no grammar"


def test_a_long_answers_edits_cost_what_a_short_ones_do():
    sampling = Sampling(max_tokens=9, presence_penalty=1.0, frequency_penalty=0.5)
    editor = LogitEditor(sampling, None)

    def spent(tokens):
        began = time.thread_time()
        for token in tokens:
            editor.edit()
            editor.take(token)
        return time.thread_time() - began

    early = spent(range(2000))
    spent(range(2000, 20_000))
    assert spent(range(20_000, 22_000)) < 10 * early + 0.1


def test_without_grammars_none_is_taken():
    with pytest.raises(BadRequest, match="cannot enforce a grammar"):
        LogitEditor.of(Sampling(max_tokens=9, grammar='start: "a"'), None)
