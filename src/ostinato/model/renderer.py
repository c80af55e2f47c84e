"""The renderer: converts between conversations and token ids by a model's own tokenizer and chat template, with unforgeable roles.

Control tokens in untrusted text are fenced before the template sees the text (`chat_template`); after rendering, the text inside a fence
is encoded by a second tokenizer that knows no control tokens.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.seams import AnswerReader
from ostinato.model.answer_reader import Reader, format_for
from ostinato.model.chat_template import ChatTemplate, Fences, encodable
from ostinato.model.checkpoint_validation import GENERATION, check_ids, read_config, read_json
from ostinato.model.grammars import Grammars, GrammarTrial
from ostinato.model.response_constraints import grammar_of

# ---------------------------------------------------------------- bytes of tokens


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenBytes:
    """The bytes of single token ids. Exact for byte-level and byte-fallback tokenizers; for others the bytes of the decoded text.

    Example: for a byte-level tokenizer that cuts an emoji in two, ``b"".join(map(TokenBytes(core).of, ids)) == "🙂".encode()``
    """

    def __init__(self, core: Tokenizer, state: Mapping[str, Any] | None = None) -> None:
        """`state`: the tokenizer's parsed JSON; None: take it from `core`."""
        self._core = core
        self._plain = {id: token.content for id, token in core.get_added_tokens_decoder().items()}
        kinds = _kinds((json.loads(core.to_str()) if state is None else state).get("decoder"))
        self._level = _byte_level() if "ByteLevel" in kinds else {}
        self._fallback = "ByteFallback" in kinds

    def of(self, token: int) -> bytes:
        """Return the bytes of one id; b"" for an id that the tokenizer does not know."""
        piece = self._plain.get(token)
        if piece is not None:
            return piece.encode()
        piece = self._core.id_to_token(token)
        if piece is None:
            return b""
        if self._level:
            return bytes(self._level[character] for character in piece if character in self._level)
        if self._fallback:
            byte = _BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        return self._core.decode([token]).encode()


def _kinds(decoder: Any) -> set[str]:
    """Return the type names of a decoder and its parts."""
    if not decoder:
        return set()
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", ())))


def _byte_level() -> dict[str, int]:
    """Return GPT-2's byte alphabet {character: byte}: printable bytes are their own characters, the others are those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


# ---------------------------------------------------------------- the renderer


FENCES = ("```", "~~~")
# `encode` holds the GIL, which would stop all streams for a long text; `encode_batch_fast` releases it
_MAX_ENCODE_CHARS = 1_000


class HFRenderer:
    """Implements `core.seams.Renderer` with a Hugging Face tokenizer and chat template.

    Example: ``HFRenderer(path).chat(Conversation(messages=(Message(role=Role.USER, text="hi"),)))``. Raises BadConfig for a
    directory whose tokenizer cannot be loaded, BadRequest for input that cannot be rendered. Safe to share between threads.
    """

    vocab_size: int
    context: int

    def __init__(self, path: Path) -> None:
        config = read_config(path).get_text_config()
        try:
            library = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            core = Tokenizer.from_str(library.backend_tokenizer.to_str())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            why = " ".join(str(error).split())
            if "trust_remote_code" in why:
                why = "it is code that came with the model, which is never run"
            raise BadConfig(
                f"{path}: its tokenizer cannot be loaded ({why}); copy the files of the tokenizer from where the model came from"
            ) from error
        check_ids(path, core.get_vocab(), int(config.vocab_size))
        core.no_truncation()
        core.no_padding()
        self.vocab_size, self.context = int(config.vocab_size), int(config.max_position_embeddings)
        self._core = core
        state = json.loads(core.to_str())  # parsed once, because a vocabulary's JSON is large
        self._bytes = TokenBytes(core, state)
        self._control = _control_tokens(core)
        self._plain = _without(state, self._control)
        self._control_ids = frozenset(self._control.values())
        self._fences = Fences(self._control)
        self._adds_space = self._ids(core, "a") != self._ids(core, "\na")[-1:]
        self._template = ChatTemplate(library, self._fences)
        self._stop_ids = self._find_stop_ids(path, config, library.eos_token_id)
        self._format = format_for(
            self._template.source,
            self._control,
            getattr(library, "response_template", None),
            [token for token, id in self._control.items() if id in self._stop_ids],
        )
        self._markers = self._control_ids.intersection(
            self._control[m] for m in self._format.markers if m in self._control
        )
        self._shown = _showing(core, state, {token for token, id in self._control.items() if id in self._markers})
        self._ends = self._stop_ids.union(self._control[token] for token in self._template.ends)

    @property
    def chats(self) -> bool:
        """False for a model without a chat template, which takes only plain prompts."""
        return bool(self._template.source)

    def chat(self, conversation: Conversation) -> list[int]:
        render = self._template.with_open_message if conversation.continued else self._template.with_generation_prompt
        return self._encode_fenced(render(conversation))

    def said(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Split a conversation that ends with an assistant message into (prompt, answer): the ids that a model would be given, and those
        that it would have to sample, including the end token.

        Raises BadRequest for another last message, or if the template renders the beginning differently once the answer follows.
        """
        *before, last = conversation.messages
        if last.role is not Role.ASSISTANT:
            raise BadRequest("the last message is not the assistant's", field="messages")
        prompt = self.chat(replace(conversation, messages=tuple(before), continued=False))
        whole = self._encode_fenced(self._template.without_generation_prompt(conversation))
        answer = whole[len(prompt) :]
        end = next((place for place, token in enumerate(answer) if token in self._ends), None)
        if whole[: len(prompt)] != prompt or end is None:
            raise BadRequest("the model's chat template writes the messages before in another way", field="messages")
        return prompt, answer[: end + 1]

    def follow_up(self, conversation: Conversation, known: int) -> list[int]:
        if conversation.continued:
            raise BadRequest("a conversation whose last message is continued is rendered anew", field="messages")
        ends = {token for token, id in self._control.items() if id in self._ends}
        ids = self._encode_fenced(self._template.text_after(conversation, known, ends))
        end = next((i for i, token in enumerate(ids) if token in self._ends), None)
        if end is not None and not self.decode(ids[:end]).strip():
            return ids[end + 1 :]
        return ids

    def conversation_of(self, ids: Sequence[int]) -> Conversation | None:
        """Invert `chat`: return a conversation without tools that `chat` renders to these ids; None if none was found, as for a template
        that does not write roles as words.
        """
        parsed = self.messages_of(ids)
        trimmed = [replace(message, text=message.text.strip()) for message in parsed]
        for messages in (parsed, trimmed):
            for asked in (messages[:-1], messages):  # the last message is a generation prompt, or one that is continued
                if not asked or (asked is messages and messages[-1].role is not Role.ASSISTANT):
                    continue
                conversation = Conversation(messages=tuple(asked), continued=asked is messages)
                with contextlib.suppress(BadRequest):
                    if self.chat(conversation) == list(ids):
                        return conversation
        return None

    def messages_of(self, ids: Sequence[int]) -> list[Message]:
        """Parse the messages of a rendered conversation, including the answer's opening; [] if the template writes no roles as words."""
        return _messages(list(_segments(ids, self.token_bytes)))

    def with_note(self, ids: Sequence[int], note: str) -> list[int]:
        """Append a text to the last message of a rendered conversation; [] if it does not end as the template ends a prompt.

        Raises BadRequest for a text that the tokenizer can only encode with control tokens.
        """
        tail = self._tail
        if not tail or list(ids[-len(tail) :]) != tail:
            return []
        return [*ids[: -len(tail)], *self.encode(note), *tail]

    @cached_property
    def _tail(self) -> list[int]:
        """The ids that the template writes between the last user message's text and the answer; [] if unknown."""
        try:
            written = self._template.with_generation_prompt(
                Conversation(messages=(Message(role=Role.USER, text=_MARK),))
            )
        except BadRequest:  # the template requires other roles
            return []
        return self._encode_piece(self._core, written.rpartition(_MARK)[2], first=False)

    def grammar(self, conversation: Conversation) -> str:
        thinks = bool(self._format.reasoning)
        opening = self._template.opening
        return grammar_of(
            conversation,
            self._format.wording,
            self._control,
            thinks=thinks,
            opening=opening,
            opener=self._format.opener,
        )

    def call_token(self) -> int | None:
        opener = self._format.opener
        return next((id for token, id in self._control.items() if re.fullmatch(opener, token)), None)

    def has_compiled(self, grammar: str) -> bool:
        return self.grammars.has(grammar)

    def compile(self, grammar: str) -> None:
        self._trial.check(grammar)
        self.grammars.matcher(grammar)  # cached for the engine

    def fulfils(self, grammar: str, ids: Sequence[int]) -> bool:
        return self.grammars.accepts(grammar, ids)

    def reader(self, conversation: Conversation, turn: str) -> AnswerReader:
        opening = "" if conversation.continued else self._template.opening
        return Reader(self._format, tools=conversation.callable_tools, turn=turn, opening=opening)

    def encode(self, text: str) -> list[int]:
        ids = self._ids(self._plain, encodable(text, "prompt"))
        self._check_control(ids, [])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._shown.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in self._control_ids and token not in self._markers else self._bytes.of(token)

    def opens_call(self, text: str) -> bool:
        return self._format.opens_call(text)

    def reserved_ids(self) -> frozenset[int]:
        """Return the tokens that no dial may steer: control tokens, except those that end an answer (so that dials may affect its length),
        and the tokens in the openings of tool calls and of fenced code.
        """
        openings = (self.encode(text) for text in (*self._format.openings, *FENCES))
        return (self._control_ids - self._stop_ids).union(*openings)

    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @cached_property
    def grammars(self) -> Grammars:
        """The grammar compiler for this tokenizer. Takes half a second to build."""
        return Grammars(self._core.to_str(), self.vocab_size, self._stop_ids)

    @cached_property
    def _trial(self) -> GrammarTrial:
        return GrammarTrial(self._core.to_str(), self.vocab_size, self._stop_ids)

    # ------------------------------------------------------------ text -> ids

    def _encode_fenced(self, text: str) -> list[int]:
        """Encode rendered text: fenced pieces as ordinary characters, the rest with control tokens."""
        ids: list[int] = []
        for piece, fenced in self._fences.pieces(text):
            ids += self._encode_piece(self._plain if fenced else self._core, piece, first=not ids)
        self._check_control(ids, [self._control[token] for token in self._fences.written(text)])
        return ids

    def _check_control(self, ids: Sequence[int], written: Sequence[int]) -> None:
        """Raise BadRequest unless the control tokens in `ids` are exactly those that the template wrote: the last line of defence."""
        if [token for token in ids if token in self._control_ids] != written:
            raise BadRequest(
                "the text holds characters that this model's tokenizer turns into control tokens", field="messages"
            )

    def _encode_piece(self, tokenizer: Tokenizer, piece: str, *, first: bool) -> list[int]:
        """Encode a piece; unless it is the first, without the space that some tokenizers add before a text's first word."""
        if first or not self._adds_space or not piece:
            return self._ids(tokenizer, piece)
        return self._ids(tokenizer, "\n" + piece)[len(self._ids(tokenizer, "\n")) :]

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
        if len(text) <= _MAX_ENCODE_CHARS:
            return tokenizer.encode(text, add_special_tokens=False).ids
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _find_stop_ids(self, path: Path, config: Any, library_end: Any) -> frozenset[int]:
        """Return the end tokens by configuration, and the control token that the template writes after the last answer."""
        stated = {"config.json": getattr(config, "eos_token_id", None), "tokenizer_config.json": library_end}
        if (path / GENERATION).is_file():
            stated[GENERATION] = read_json(path / GENERATION).get("eos_token_id")
        ids = {id for name, value in stated.items() for id in _token_ids(path / name, value)}
        possible = {id for id in ids if 0 <= id < self.vocab_size}  # some files use -1 for none
        return frozenset(possible.union(self._control[token] for token in self._template.ends[:1]))


_MARK = "qzvnotevzq"  # a text that no template looks for
_ROLES = {role.value: role for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT)} | {"model": Role.ASSISTANT}


def _segments(ids: Sequence[int], bytes_of: Callable[[int], bytes]) -> Iterator[str]:
    """Yield the texts between control tokens, empty ones included."""
    held: list[bytes] = []
    for token in ids:
        if piece := bytes_of(token):
            held.append(piece)
        else:
            yield b"".join(held).decode(errors="replace")
            held = []
    yield b"".join(held).decode(errors="replace")


def _messages(segments: Sequence[str]) -> list[Message]:
    """Parse messages from segments: a role is the first line of a segment, or a segment of its own. [] for any other form."""
    messages: list[Message] = []
    role: Role | None = None
    for text in segments:
        line, newline, rest = text.partition("\n")
        if role is not None:
            messages.append(Message(role=role, text=text.removeprefix("\n\n")))
            role = None
        elif (named := _ROLES.get(line.strip())) is not None and newline:
            messages.append(Message(role=named, text=rest))
        elif named is not None:
            role = named
        elif text.strip():
            return []
    return messages


def _token_ids(file: Path, value: Any) -> list[int]:
    """Return the ids in an `eos_token_id`: none, one or several. Raises BadConfig for anything else."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(id) is not int for id in ids):
        raise BadConfig(f"{file}: eos_token_id is {str(value)[:60]!r}; it must be a token's id or a list of them")
    return ids


def _control_tokens(core: Tokenizer) -> dict[str, int]:
    """Return all added tokens except runs of white space, which some tokenizers add as ordinary text."""
    return {t.content: i for i, t in core.get_added_tokens_decoder().items() if t.content and not t.content.isspace()}


def _without(state: Mapping[str, Any], control: Collection[str]) -> Tokenizer:
    """Return a tokenizer from this JSON that does not know the control tokens."""
    kept = [token for token in state["added_tokens"] if token["content"] not in control]
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": kept}))


def _showing(core: Tokenizer, state: Mapping[str, Any], markers: Collection[str]) -> Tokenizer:
    """Return a copy of the tokenizer, whose JSON is `state`, that shows these tokens when it decodes; `core` itself without markers."""
    if not markers:
        return core
    tokens = [
        {**token, "special": token["special"] and token["content"] not in markers} for token in state["added_tokens"]
    ]
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": tokens}))
