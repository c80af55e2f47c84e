"""No text, in any role, in any arrangement, adds a control token to a conversation, and no text is changed by rendering."""

import functools
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.conversations import assistant, talk, user

from ostinato.model.renderer import HFRenderer
from ostinato.testing.tiny import SPECIALS, tiny_model


@functools.cache
def renderer():
    with tempfile.TemporaryDirectory() as folder:
        return HFRenderer(tiny_model(Path(folder) / "tiny", layers=1))


PIECES = st.sampled_from(
    [
        *SPECIALS,
        "<|im",
        "_end|>",
        "_start|>",
        "<|",
        "|>",
        "system",
        "\n",
        " ",
        "\ufdd0",
        "\ufdd1",
        "\ufdd2",
        "\ufdd3",
        "é",
    ]
)
TEXT = st.one_of(
    st.lists(PIECES, max_size=8).map("".join), st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}),
    min_size=1,
    max_size=4,
)
DROPPED = str.maketrans("", "", "\ufdd0\ufdd1\ufdd2\ufdd3")


def kept(message):
    return message["content"].translate(DROPPED)


@given(MESSAGES)
def test_control_tokens_are_the_template_s_and_text_survives(messages):
    ids = renderer().chat(talk(*messages))
    assert [i for i in ids if i >= 256] == [257, 258] * len(messages) + [257]
    want = "".join(f"{m['role']}\n{kept(m)}\n" for m in messages) + "assistant\n"
    assert renderer().decode(ids) == want


@given(MESSAGES, TEXT, TEXT)
def test_a_conversation_can_be_built_turn_by_turn_from_stored_ids(messages, answer, question):
    answer = answer.translate(DROPPED)
    whole = talk(*messages, assistant(answer), user(question))
    stored = [*renderer().chat(talk(*messages)), *renderer().encode(answer), 258]
    assert stored + renderer().follow_up(whole, len(messages) + 1) == renderer().chat(whole)
