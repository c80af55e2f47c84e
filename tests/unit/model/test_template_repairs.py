"""Conversations of any order of roles, in templates that take only some: every text arrives in the prompt, or the message is refused."""

import pytest
from tests.fakes.chat_templates import STYLES, Style, styled_model
from tests.fakes.conversations import READ, assistant, call, result, system, talk, user
from tests.growth import grows_with_its_input

from ostinato.core.conversation import ToolCall
from ostinato.core.errors import BadRequest
from ostinato.model.renderer import HFRenderer

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
TEMPLATES = {
    "plain": PLAIN,
    "system first or error": (
        "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        + TURN
        + "{% endfor %}"
        + ASK
    ),
    "later system dropped": (
        "{% for m in messages %}{% if m['role'] != 'system' or loop.first %}" + TURN + "{% endif %}{% endfor %}" + ASK
    ),
    "no system": (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + TURN
        + "{% endfor %}"
        + ASK
    ),
    "system dropped": "{% for m in messages if m['role'] != 'system' %}" + TURN + "{% endfor %}" + ASK,
    "alternating": (
        "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
        "{% for m in messages[:1] if m['role'] == 'system' %}" + TURN + "{% endfor %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + ASK
    ),
    "needs a user": (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found in messages.') }}{% endif %}" + PLAIN
    ),
    "no empty text": (
        "{% for m in messages %}{% if not m['content'] and m['role'] == 'assistant' %}{{ raise_exception('empty') }}{% endif %}"
        + TURN
        + "{% endfor %}"
        + ASK
    ),
    "trimming": PLAIN.replace("m['content']", "m['content'] | trim"),
    "JSON": PLAIN.replace("m['content']", "m['content'] | tojson"),
}
TALKS = {
    "later system": [system("s1"), user("u1"), assistant("a1"), system("s2"), user("u2")],
    "system at the end": [system("s1"), user("u1"), assistant("a1"), system("s2")],
    "only a later system": [user("u1"), assistant("a1"), system("s2"), user("u2")],
    "two at the beginning": [system("s1"), system("s2"), user("u1")],
    "system alone": [system("s1")],
    "system and answer": [system("s1"), assistant("a1"), user("u1")],
    "answer first": [assistant("a1"), user("u1")],
    "users in a row": [user("u1"), user("u2"), assistant("a1"), user("u3")],
    "answers in a row": [user("u1"), assistant("a1"), assistant("a2"), user("u2")],
    "empty answer": [user("u1"), assistant(""), user("u2")],
    "result first": [result("r1"), user("u1")],
    "result of nothing": [user("u1"), assistant("a1"), result("r1"), user("u2")],
    "two results": [
        user("u1"),
        assistant("a1", call("1"), call("2")),
        result("r1", "1"),
        result("r2", "2"),
        user("u2"),
    ],
    "call left open": [user("u1"), assistant("a1", call("1")), user("u2")],
    "lines": [user(' a "quote"\n\n\tand <b>\\ '), assistant("a1\n"), system("\ns1\n"), user("\u2028\u0085é")],
}


def model_with(path, template):
    return styled_model(path, Style(template))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    return {name: HFRenderer(model_with(folder / str(i), text)) for i, (name, text) in enumerate(TEMPLATES.items())} | {
        name: HFRenderer(styled_model(folder / f"style {i}", style)) for i, (name, style) in enumerate(STYLES.items())
    }


def seen(renderer, ids):
    return renderer._core.decode(ids, skip_special_tokens=False)


def texts(messages):
    return [message["content"] for message in messages if message["content"]]


@pytest.mark.parametrize("name", [*TEMPLATES, *STYLES])
@pytest.mark.parametrize("history", [name for name in TALKS if name != "lines"])
def test_every_text_of_any_history_arrives(renderers, name, history):
    tools = [READ] if any(message.get("calls") for message in TALKS[history]) else []
    conversation = talk(*TALKS[history], tools=tools)
    shown = seen(renderers[name], renderers[name].chat(conversation))
    places = [shown.find(text) for text in texts(TALKS[history])]
    assert -1 not in places
    assert places == sorted(places)
    for called in (called for message in conversation.messages for called in message.calls):
        assert called.name in shown
        assert "calc.py" in shown


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_that_templates_trim_or_write_as_json_count_as_arrived(renderers, name):
    renderers[name].chat(talk(*TALKS["lines"]))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("history", TALKS)
def test_what_follows_an_answer_is_what_a_fresh_rendering_has_there(renderers, name, history):
    renderer, messages = renderers[name], TALKS[history]
    known = max((i for i, message in enumerate(messages[:-1], 1) if message["role"] == "assistant"), default=0)
    if not known or messages[known - 1]["calls"]:
        return
    whole = talk(*messages)
    try:
        rest = renderer.follow_up(whole, known)
    except BadRequest:  # the answer was left out or joined: the gateway renders the whole anew
        assert history in ("empty answer", "answers in a row")
        return
    fresh = renderer.chat(whole)
    assert fresh[-len(rest) :] == rest
    assert all(text.strip() in seen(renderer, rest) for text in texts(messages[known:]) if name != "JSON")


def test_a_template_that_takes_a_history_gets_it_as_it_is(renderers):
    for history in ("later system", "two at the beginning", "users in a row", "answer first", "empty answer"):
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALKS[history])
        assert (
            seen(renderers["plain"], renderers["plain"].chat(talk(*TALKS[history])))
            == turns + "<|im_start|>assistant\n"
        )


def test_a_later_system_message_is_told_by_the_user_where_it_stands(renderers):
    shown = seen(
        renderers["later system dropped"], renderers["later system dropped"].chat(talk(*TALKS["later system"]))
    )
    assert shown.endswith(
        "a1<|im_end|>\n<|im_start|>user\n<system>\ns2\n</system><|im_end|>\n<|im_start|>user\nu2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_continued_answer_keeps_its_place_at_the_end(renderers):
    for name in TEMPLATES:
        for before in ([user("u1")], [assistant("a1")], [system("s1")], [user("u1"), assistant("a1")]):
            conversation = talk(*before, assistant("so far "), continued=True)
            assert seen(renderers[name], renderers[name].chat(conversation)).endswith("so far ")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"path": "a', '{"path": "a'), ("", ""), ("[1]", "[1]"), ("null", "null"), ("two words", "two words")],
)
@pytest.mark.parametrize("name", STYLES)
def test_arguments_that_are_no_object_arrive_in_every_template(renderers, name, arguments, shown):
    said = assistant("", ToolCall(id="1", name="read", arguments=arguments))
    text = seen(
        renderers[name], renderers[name].chat(talk(user("u1"), said, result("r1", "1"), user("u2"), tools=[READ]))
    )
    assert shown in text or shown.replace('"', '\\"') in text
    assert text.index("u1") < text.index("r1") < text.index("u2")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (PLAIN.replace("{% for m in messages %}", "{% for m in messages if m['content'] != 'lost' %}"), None),
        ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_end|>' }}{% endfor %}" + ASK, 0),
        ("{% for m in messages[-1:] %}" + TURN + "{% endfor %}" + ASK, 0),
    ],
    ids=["one text", "all texts", "all but the last"],
)
def test_a_text_that_no_form_brings_into_the_prompt_is_refused_by_its_message(tmp_path, template, message):
    renderer = HFRenderer(model_with(tmp_path / "m", template))
    conversation = talk(user("first"), assistant("b"), user("lost"))
    if message is None:  # what a template does to this very text is its own affair
        assert "first" in seen(renderer, renderer.chat(conversation))
        return
    with pytest.raises(BadRequest, match="leaves out 'first'") as caught:
        renderer.chat(conversation)
    assert caught.value.field == f"messages[{message}]"


def test_a_template_that_hoists_system_messages_loses_none_in_a_follow_up(tmp_path):
    hoisting = (
        "{% for m in messages if m['role'] == 'system' %}" + TURN + "{% endfor %}"
        "{% for m in messages if m['role'] != 'system' %}" + TURN + "{% endfor %}" + ASK
    )
    renderer = HFRenderer(model_with(tmp_path / "m", hoisting))
    whole = talk(*TALKS["later system"])
    assert "s2" in seen(renderer, renderer.chat(whole))
    with pytest.raises(BadRequest, match="another way"):
        renderer.follow_up(whole, 3)


def test_thoughts_in_an_answer_may_be_left_out(tmp_path):
    cut = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
    renderer = HFRenderer(model_with(tmp_path / "m", cut))
    shown = seen(renderer, renderer.chat(talk(user("a"), assistant("<think>hm</think>yes"), user("b"))))
    assert "hm" not in shown
    assert "yes" in shown


def test_looking_for_the_texts_costs_little(renderers):
    renderer = renderers["plain"]

    def turns(count):
        asked = ((user(f"{i} " + "word " * 60), assistant(f"{i} ok")) for i in range(count))
        return talk(*(message for pair in asked for message in pair), user("x"))

    assert renderer._template.with_generation_prompt(turns(320)).count("word") == 320 * 60
    assert grows_with_its_input(renderer._template.with_generation_prompt, turns(40), turns(320))
