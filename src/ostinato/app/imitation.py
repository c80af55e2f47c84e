"""The parts of training by imitation: conversations from a file, the trainer, and the resulting model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ostinato.app.numerics import trainer_backend, trainer_contract, training
from ostinato.app.storage import model_path
from ostinato.config import Config
from ostinato.core.conversation import Conversation
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.lines import lines_of
from ostinato.core.records import Turn
from ostinato.core.weights import Learned
from ostinato.serve.dialects.dialect import Omissions
from ostinato.serve.dialects.openai import read_messages, read_tools
from ostinato.weights.follow.export import write_model

if TYPE_CHECKING:
    from ostinato.model.renderer import HFRenderer

MOST_BYTES = 1 << 30
_FIELDS = {"messages", "tools"}
_COPIED = (".json", ".jinja", ".txt", ".model")


def read_demonstrations(path: Path) -> list[Conversation]:
    """Read one conversation per line, {"messages": [...], "tools": [...]} as in OpenAI's chat API.

    Raises BadConfig, which names the line, the field and the remedy.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadConfig(f"demonstrations {path}: larger than {MOST_BYTES} bytes; cut it into several")
        lines = lines_of(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(
            f"demonstrations {path} cannot be read: {error}; name a text file in UTF-8, one conversation per line"
        ) from error
    found = [_read(f"demonstrations {path}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadConfig(f"demonstrations {path}: the file is empty; give one conversation per line")
    return found


def _read(where: str, line: str) -> Conversation:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{where} is not JSON: {error}; write one object on each line") from error
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise BadConfig(f'{where}: give an object with "messages", a list')
    given = cast("dict[str, Any]", row)
    if unknown := given.keys() - _FIELDS:
        raise BadConfig(f"{where}: there is no field {sorted(unknown)[0]!r}; there are messages and tools")
    if not all(isinstance(each, dict) for each in [*given["messages"], *(given.get("tools") or [])]):
        raise BadConfig(f'{where}: messages and tools are lists of objects, as in {{"role": "user", "content": "Hi"}}')
    omissions = Omissions()
    try:
        messages = read_messages(given["messages"], omissions)
        tools = read_tools(given.get("tools") or [])
    except BadRequest as error:
        raise BadConfig(f"{where}: {error}") from error
    if omissions.words:
        raise BadConfig(
            f"{where}: holds {omissions.words[0]}; the model reads text only, so leave such conversations out"
        )
    return Conversation(messages=messages, tools=tools)


def imitate_into(
    config: Config,
    shown: list[Conversation],
    target: Path,
    *,
    epochs: int,
    batch: int,
    on_step: Callable[[Learned], None],
) -> None:
    """Train the configured model on the conversations and write the result as a plain model directory. Imports torch.

    Raises BadConfig for a conversation that the model's template cannot render, for a target that is not empty, and as the training
    worker does; StorageFull.
    """
    from ostinato.model.renderer import HFRenderer
    from ostinato.train.imitation import imitate
    from ostinato.train.trainer import PolicyTrainer

    if target.exists() and any(target.iterdir()):
        raise BadConfig(f"--out {target} is not empty; give a new directory")
    source = model_path(config)
    renderer = HFRenderer(source)
    lessons = [_rendered(number, each, renderer) for number, each in enumerate(shown, 1)]
    trainer = PolicyTrainer(source, training(config), trainer_contract(config), backend=trainer_backend(config))
    for learned in imitate(trainer, lessons, epochs=epochs, batch=batch, seed=config.train.seed):
        on_step(learned)
    files = [path for path in source.iterdir() if path.is_file() and path.suffix in _COPIED]
    kept = [path for path in files if "safetensors" not in path.name]
    write_model(trainer.weights(), target, kept, {"format": "pt"})


def _rendered(number: int, shown: Conversation, renderer: HFRenderer) -> tuple[Turn, ...]:
    from ostinato.train.imitation import shown_turns

    try:
        turns = shown_turns(shown, renderer)
    except BadRequest as error:
        raise BadConfig(f"demonstration {number}: {error}") from error
    longest = max(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns)
    if longest > renderer.context:
        raise BadConfig(
            f"demonstration {number} has {longest} tokens, and the model's context {renderer.context}: shorten it, or leave it out"
        )
    return turns
