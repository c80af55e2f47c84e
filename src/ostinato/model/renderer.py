"""Messages <-> token ids for one model directory: its own tokenizer and chat template, with roles that cannot be forged.

Control tokens that stand in somebody's text are fenced with two noncharacters before the template sees the text; after
rendering, what is inside a fence is encoded by a second tokenizer that knows no control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from ostinato.core.errors import BadConfig, BadRequest
from ostinato.model.token_bytes import TokenBytes

ROLES = ("system", "user", "assistant", "tool")
# Unicode noncharacters: never part of interchanged text, so nothing is lost when they are dropped from a message.
_OPEN, _CLOSE, _HOLE = "\ufdd0", "\ufdd1", "\ufdd2"
_FENCED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_FENCE = re.compile(f"[{_OPEN}{_CLOSE}]")
_DROPPED = str.maketrans("", "", _OPEN + _CLOSE + _HOLE)


class HFRenderer:
    """core Renderer over a Hugging Face tokenizer and chat template.

    Example: ``HFRenderer(path).chat([{"role": "user", "content": "hi"}])``. Raises BadConfig for a directory whose tokenizer
    cannot be loaded, BadRequest for messages that cannot be rendered. Safe to share between threads.
    """

    vocab_size: int
    context: int

    def __init__(self, path: Path) -> None:
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).get_text_config()
            library = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            core = Tokenizer.from_str(library.backend_tokenizer.to_str())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise BadConfig(f"{path}: its tokenizer cannot be loaded ({error})") from error
        core.no_truncation()
        core.no_padding()
        self.vocab_size, self.context = int(config.vocab_size), int(config.max_position_embeddings)
        self._library, self._core = library, core
        self._bytes = TokenBytes(core)
        self._control = _control_tokens(core)
        self._plain = _without(core, set(self._control))
        self._control_ids = frozenset(self._control.values())
        self._control_re = _any_of(self._control)
        self._adds_space = self._ids(core, "a") != self._ids(core, "\na")[-1:]
        self._stop_ids = self._find_stop_ids(path, config)

    def chat(self, messages: Sequence[dict[str, Any]], *, continue_final: bool = False) -> list[int]:
        """Token ids of a conversation, ready for the assistant to speak.

        With `continue_final` the last message is an assistant's beginning: its text stands at the end, exactly as given, and
        no end token follows. Raises BadRequest.
        """
        clean = self._clean(messages)
        if not continue_final:
            return self._encode_fenced(self._render(clean, speak=True))
        if clean[-1]["role"] != "assistant":
            raise BadRequest("only an assistant message can be continued", field=f"messages[{len(clean) - 1}].role")
        head, _ = self._around(clean, len(clean) - 1, speak=False)
        return self._encode_fenced(head + clean[-1]["content"])

    def follow_up(self, messages: Sequence[dict[str, Any]], known: int, *, ended: bool = True) -> list[int]:
        """Ids to append to a stored turn so that `messages[known:]` follow it; the assistant may then speak.

        `messages[known - 1]` is what the stored turn sampled. `ended` says whether its stored ids close with an end token;
        if not (it ran into its budget or a stop string), the template's end token comes first in the answer.
        """
        clean = self._clean(messages)
        if not 0 < known <= len(clean) or clean[known - 1]["role"] != "assistant":
            raise BadRequest("a stored turn can only be followed after an assistant message", field="messages")
        _, tail = self._around(clean, known - 1, speak=True)
        ids = self._encode_fenced(tail)
        end = next((i for i, token in enumerate(ids) if token in self._stop_ids), None)
        if ended and end is not None and not self.decode(ids[:end]).strip():
            return ids[end + 1 :]
        return ids

    def encode(self, text: str) -> list[int]:
        ids = self._ids(self._plain, _checked(text, "prompt"))
        self._check_control(ids, [])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._core.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in self._control_ids else self._bytes.of(token)

    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    # ------------------------------------------------------------ messages -> text

    def _clean(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        if not messages:
            raise BadRequest("messages is empty: give at least one", field="messages")
        return [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: Any, field: str) -> dict[str, str]:
        if not isinstance(message, Mapping):
            raise BadRequest(f"{field} is not an object", field=field)
        role = message.get("role")
        if role not in ROLES:
            raise BadRequest(
                f"{field}.role is {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}", field=f"{field}.role"
            )
        if message.get("tool_calls") or message.get("function_call"):
            raise BadRequest(f"{field}.tool_calls is not supported", field=f"{field}.tool_calls")
        return {"role": cast("str", role), "content": self._fence(_text(message.get("content"), f"{field}.content"))}

    def _fence(self, text: str) -> str:
        text = text.translate(_DROPPED)
        return self._control_re.sub(f"{_OPEN}\\g<0>{_CLOSE}", text)

    def _render(self, clean: Sequence[Mapping[str, str]], *, speak: bool) -> str:
        if not self._library.chat_template:
            raise BadRequest("this model has no chat template: use /v1/completions", field="messages")
        try:
            return cast(
                "str", self._library.apply_chat_template(list(clean), tokenize=False, add_generation_prompt=speak)
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", field="messages") from error

    def _around(self, clean: Sequence[Mapping[str, str]], at: int, *, speak: bool) -> tuple[str, str]:
        """What the template writes before and after the text of message `at`."""
        holed = [{**message, "content": _HOLE} if i == at else message for i, message in enumerate(clean)]
        head, hole, tail = self._render(holed, speak=speak).rpartition(_HOLE)
        if not hole:
            raise BadRequest("the model's chat template leaves out this assistant message", field=f"messages[{at}]")
        return head, tail

    # ------------------------------------------------------------ text -> ids

    def _encode_fenced(self, text: str) -> list[int]:
        """Encode rendered text: pieces inside a fence as ordinary characters, the rest with control tokens."""
        ids: list[int] = []
        written: list[int] = []
        for i, piece in enumerate(_FENCED.split(text)):
            if i % 2:
                ids += self._encode_piece(self._plain, piece, first=not ids)
                continue
            for part in _FENCE.split(piece):  # a fence that the template cut in two still separates
                ids += self._encode_piece(self._core, part, first=not ids)
                written += [self._control[token] for token in self._control_re.findall(part)]
        self._check_control(ids, written)
        return ids

    def _check_control(self, ids: Sequence[int], written: Sequence[int]) -> None:
        """The last line of defence: the control tokens among `ids` must be those that the template wrote, in its order."""
        if [token for token in ids if token in self._control_ids] != written:
            raise BadRequest(
                "the text holds characters that this model's tokenizer turns into control tokens", field="messages"
            )

    def _encode_piece(self, tokenizer: Tokenizer, piece: str, *, first: bool) -> list[int]:
        """Ids of `piece`; unless it is the first, without the space that some tokenizers put before a text's first word."""
        if first or not self._adds_space or not piece:
            return self._ids(tokenizer, piece)
        return self._ids(tokenizer, "\n" + piece)[len(self._ids(tokenizer, "\n")) :]

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def _find_stop_ids(self, path: Path, config: Any) -> frozenset[int]:
        """End tokens by configuration, and the control token that the template puts after an assistant's text."""
        found: list[Any] = [config.eos_token_id, self._library.eos_token_id]
        if (path / "generation_config.json").is_file():
            found.append(GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id)
        ids = {int(i) for item in found if item is not None for i in (item if isinstance(item, list) else [item])}
        if self._library.chat_template:
            dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _HOLE}]
            try:
                after = self._ids(self._core, self._around(dialogue, 1, speak=False)[1].lstrip())
            except BadRequest:  # a template that wants other roles: what the configuration says must do
                after = []
            ids.update(self._control_ids.intersection(after[:1]))
        return frozenset(ids)


def _text(content: Any, field: str) -> str:
    """Content as one string: a string, or the text of its parts."""
    if isinstance(content, str):
        return _checked(content, field)
    if not isinstance(content, list):
        raise BadRequest(f"{field} must be a string or a list of text parts", field=field)
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f'{field}[{i}] must be {{"type": "text", "text": ...}}', field=f"{field}[{i}]")
        texts.append(cast("str", part["text"]))
    return _checked("".join(texts), field)


def _checked(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{field} holds half of a surrogate pair, which is not text", field=field) from error
    return text


def _control_tokens(core: Tokenizer) -> dict[str, int]:
    """Every added token but runs of white space, which some tokenizers add as ordinary text."""
    return {t.content: i for i, t in core.get_added_tokens_decoder().items() if t.content and not t.content.isspace()}


def _any_of(tokens: Mapping[str, int]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    # without tokens: a pattern that matches nothing
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _without(core: Tokenizer, control: set[str]) -> Tokenizer:
    """A copy of the tokenizer that does not know the control tokens."""
    state = json.loads(core.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in control]
    return Tokenizer.from_str(json.dumps(state))
