"""The training worker's objects: the source of samples, the trainer, and the publisher of its weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from ostinato.app.log_suites import held_out_prompts
from ostinato.app.numerics import trainer_backend, training
from ostinato.app.storage import Run, home
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.conversation import Conversation, Role
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.numerics import Contract
from ostinato.core.records import Arm, PolicyVersion, SteeringBasis, Turn
from ostinato.core.seams import Folds, Log
from ostinato.core.weights import Learned
from ostinato.loop import Learner
from ostinato.release.ledger import Ancestry, ReleaseLedger
from ostinato.release.monitors.proxy_gap import gold_people
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import DeskSource, RewardDesk
from ostinato.reward.protocol import Asker
from ostinato.reward.runners import asker_of, late_asker_of
from ostinato.weights.config import PublisherConfig
from ostinato.weights.follow.follower import Follower, Released
from ostinato.weights.publish.publisher import Candidates, Overlapped, Published, VersionPublisher
from ostinato.weights.publish.ranks import RankSettings, Together

if TYPE_CHECKING:
    from ostinato.model.renderer import HFRenderer
    from ostinato.train.sharding.trainer import ShardedTrainer
    from ostinato.train.trainer import PolicyTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The training worker's parts. `learner` runs the loop's stages over the other parts.

    `anchor` returns the version near which training is kept throughout (a branch's: where it began). `bases` returns steering bases by
    hash. `tokens`: the model's tokens. `numerics`: the id of the trainer's numerics contract.
    """

    learner: Learner
    trainer: PolicyTrainer | ShardedTrainer
    desk: RewardDesk
    source: DeskSource
    released: Released
    releases: ReleaseLedger
    ancestry: Ancestry
    candidates: Candidates
    stored: Overlapped
    anchor: Callable[[], Awaitable[PolicyVersion | None]]
    bases: Callable[[Sequence[str]], Awaitable[Sequence[SteeringBasis]]]
    tokens: ModelTokens
    numerics: str


def open_desk(
    config: Config,
    log: Log,
    folds: Folds | None = None,
    contract: Contract | None = None,
    asker: Asker | None = None,
    tokens: ModelTokens | None = None,
    late_asker: Asker | None = None,
) -> RewardDesk:
    """Return the reward desk over a log. With a contract it holds back turns made under another one, if the settings say so.

    `asker` calls the configured reward function, `late_asker` the one for late rewards; None: one is opened. Without `tokens` all tokens of
    a turn get the same credit, and nothing is learned from corrections and hints.
    """
    only = contract.id if contract is not None and config.train.foreign_numerics == "refuse" else None
    gold = gold_people(config.release.monitors)
    asker = asker or asker_of(config.reward)
    return RewardDesk(
        log,
        asker,
        wall_clock,
        config.reward,
        folds=folds,
        numerics=only,
        gold=gold,
        taught=taught_by(config),
        held_out=held_out_prompts(config),
        token_bytes=None if tokens is None else tokens.token_bytes,
        answer_ids=None if tokens is None else tokens.answer_ids,
        hint_tokens=tokens,
        late_asker=late_asker or late_asker_of(config.reward),
    )


class ModelTokens:
    """Converts a model's tokens to text and back. The tokenizer is loaded on first use."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def _renderer(self) -> HFRenderer:
        from ostinato.model.renderer import HFRenderer

        return HFRenderer(self._model)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text."""
        return self._renderer.token_bytes(token)

    def answer_ids(self, turn: Turn, text: str) -> tuple[int, ...]:
        """Return the tokens of a text in place of a turn's answer, with the token that ended the turn.

        Empty if the answer is more than its text (tool calls, reasoning), had to follow a grammar, or the text would not fit.
        """
        if turn.calls != () or turn.sampling.grammar:
            return ()
        reader = self._renderer.reader(Conversation(messages=()), turn.id)
        if any(piece.reasoning for piece in (*reader.feed(turn.text), *reader.finish())):
            return ()
        last = turn.sampled_ids[-1:]
        ids = (*self._renderer.encode(text), *(last if last[0] in self._renderer.stop_ids() else ()))
        return ids if len(turn.prompt_ids) + len(ids) <= self._renderer.context else ()

    def hinted_ids(self, turn: Turn, note: str) -> tuple[int, ...]:
        """Return the turn's prompt with a note at the end of its last message; () if the prompt has another ending, or it would not fit."""
        try:
            ids = self._renderer.with_note(turn.prompt_ids, note)
        except BadRequest:  # the note can only be encoded with control tokens
            return ()
        return tuple(ids) if ids and len(ids) + len(turn.sampled_ids) <= self._renderer.context else ()

    def said_between(self, turn: Turn, following: Turn) -> str:
        """Return the user messages between two turns; "" if others are between them (another answer) or the template names no roles."""
        known = (*turn.prompt_ids, *turn.sampled_ids)
        if following.prompt_ids[: len(known)] != known:
            return ""
        said = self._renderer.messages_of(following.prompt_ids[len(known) :])
        if not said or said[-1].role is not Role.ASSISTANT or any(each.role is not Role.USER for each in said[:-1]):
            return ""
        return "\n".join(each.text for each in said[:-1])


def taught_by(config: Config) -> Taught:
    """Return whose turns the trainer learns from. Beside groups of rollouts, which wait for no reward, a step takes people's turns."""
    source = config.learn.source
    return Taught(
        people=source != "worlds",
        groups=0 if source == "people" else config.worlds.groups,
        every=source == "people" and config.learn.batch == "auto",
        worlds_weight=config.learn.worlds_weight,
        corrections=config.learn.corrections,
        values=config.train.value_lambda is not None,
    )


def open_learning(
    run: Run,
    model: Path,
    live: PolicyVersion,
    contract: Contract,
    *,
    on_learned: Callable[[Learned], None],
    on_published: Callable[[Published], None],
    asker: Asker | None = None,
    late_asker: Asker | None = None,
) -> Learning:
    """Build the trainer of a run whose users `live` serves now, and the objects around it. Imports torch. Askers as in `open_desk`."""
    from ostinato.train.stepper import Stepper

    config = run.config
    settings = config.publish.model_copy(update={"scratch": config.publish.scratch or run.home.root})
    trainer, lines = _trainer(model, config, contract, settings)
    tokens = ModelTokens(model)
    desk = open_desk(config, run.log, run.folds, contract, asker, tokens, late_asker)
    # keep two fetched versions, the anchor and the newest release: the next release is built from these and its delta
    follower = Follower(run.store, config.follow.model_copy(update={"keep": 2}))
    released = Released(follower, live)

    async def anchor() -> PolicyVersion | None:
        return (None if config.run.tenant else await follower.resolve("control")) or await follower.resolve("base")

    async def bases(hashes: Sequence[str]) -> Sequence[SteeringBasis]:
        return await run.log.find(SteeringBasis, [(name,) for name in hashes])

    source = DeskSource(desk, released.refresh, size=config.learn.least_turns, poll_s=config.learn.poll_s)
    publisher = VersionPublisher(run.store, settings, (lambda own: Together(own, lines)) if lines else None)
    candidates = Candidates(
        publisher,
        run.name,
        config.learn.publish_every,
        on_published,
        numerics=contract.id,
        newest=Arm.WORLD.value if config.learn.source != "people" or config.serve.learner_share else None,
    )
    return Learning(
        learner=Learner(
            source=source,
            rewards=source,
            trainer=Stepper(trainer, released.snapshot, on_learned, anchor, bases),
            publisher=candidates,
        ),
        trainer=trainer,
        desk=desk,
        source=source,
        released=released,
        releases=ReleaseLedger(run.log, wall_clock),
        ancestry=Ancestry(run.log),
        candidates=candidates,
        stored=Overlapped(candidates),
        anchor=anchor,
        bases=bases,
        tokens=tokens,
        numerics=contract.id,
    )


def _trainer(
    model: Path, config: Config, contract: Contract, publish: PublisherConfig
) -> tuple[PolicyTrainer | ShardedTrainer, Sequence[socket]]:
    """Return a trainer in this process alone, or one that starts `train.ranks` - 1 more, with sockets to the publishers of these."""
    backend = trainer_backend(config)
    if config.train.ranks == 1:
        from ostinato.train.trainer import PolicyTrainer

        return PolicyTrainer(model, training(config), contract, backend=backend), ()
    if config.reward.hints.weight:
        raise BadConfig(
            f"reward.hints.weight is {config.reward.hints.weight}, and train.ranks {config.train.ranks}: only a trainer of one rank learns "
            "from hints; set reward.hints.weight = 0 or train.ranks = 1"
        )
    from ostinato.train.sharding.trainer import RankProgram, ShardedTrainer

    store = config.weights.model_copy(update={"url": config.weights.url or str(home(config).weights.resolve())})
    program = RankProgram(
        module="ostinato.app.rank", settings=RankSettings(weights=store, publish=publish).model_dump_json()
    )
    trainer = ShardedTrainer(model, training(config), contract, program, backend)
    return trainer, trainer.lines
