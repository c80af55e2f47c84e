"""Router replay: the experts that the engine chose for each token, laid out for the trainer's packed tree.

Data flow: `Turn.routes` -> decoded and checked (`Experts.admits`) -> one row per token of the tree (`lay_out`) -> the model's
routers use these experts and compute the gate weights from their own live logits (`Experts.replaying`). A turn whose routes
cannot be trusted is left out with a reason, never trained on as if it had no routes.

Replay of logit edits: a grammar's masks, biases and penalties are reconstructed from a turn's own ids; the nucleus of top_p is the one
that the engine recorded; the steering of a turn's first tokens comes from the recorded dials and the basis in the log.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostinato.core import nucleus
from ostinato.core import routes as codec
from ostinato.core.errors import BadRequest, BadRoutes
from ostinato.core.records import SteeringBasis, Turn
from ostinato.core.steering import Basis
from ostinato.model.grammars import Grammars
from ostinato.model.logit_edits import UNEDITED, Edit, LogitEditor
from ostinato.model.routing import Routing
from ostinato.model.steering import LogitSteering, SteeredToken
from ostinato.train.config import TrainConfig
from ostinato.train.packing import PackedBatch

_LOG = logging.getLogger(__name__)
Ids = NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Expert ids per token of a packed tree. `disagreements`: the number of (token, layer) pairs on shared prefixes where turns differ.

    Turns that share a prefix were sampled from one cached computation, so in exact mode they agree. If they do not, the first
    turn's routes are used.
    """

    ids_NLk: Ids
    disagreements: int


def lay_out(packed: PackedBatch, routes: Sequence[Ids]) -> Routes:
    """Return one row per token of the tree; `routes` in the order of `pack`'s argument, each [tokens of the path, L, k], sets ascending.

    A turn's path is the last token that predicts one of its sampled tokens, and that token's ancestors.
    """
    ids_NLk = np.zeros((packed.tokens, *routes[0].shape[1:]), routes[0].dtype)
    filled_N = np.zeros(packed.tokens, np.bool_)
    disagreements = 0
    for index, own in enumerate(routes):
        last = int(packed.rows_M[packed.turns_M == index][-1])
        path = np.flatnonzero(packed.ends_N[: last + 1] > last)
        old = filled_N[path]
        disagreements += int((ids_NLk[path[old]] != own[old]).any(-1).sum())
        ids_NLk[path[~old]] = own[~old]
        filled_N[path] = True
    return Routes(ids_NLk=ids_NLk, disagreements=disagreements)


class Experts:
    """One model's routers during one step. For a dense model, or with replay switched off, every turn is admitted.

    Example::

        experts = Experts(routing.of(model), config)
        usable = [turn for turn in turns if experts.admits(turn)]
        routes = experts.lay_out(pack(...), usable)
        with experts.replaying(routes):
            ...  # forward and backward
        experts.settle()  # {"router_routed": 912.0, "router_flips": 0.0, ...}
    """

    def __init__(self, routing: Routing | None, config: TrainConfig) -> None:
        self._plausible = config.plausible
        self._routing = routing if routing is not None and config.router_replay else None
        if self._routing is not None and not self._routing.can_replay:
            _LOG.warning(
                "this model's router choices cannot be replayed: it trains on its own (%s)",
                self._routing.problem or "its gates cannot be recomputed to the bit",
            )
            self._routing = None
        self._known: dict[str, Ids] = {}
        self._counts: Counter[str] = Counter()
        self._replayed: Counter[str] = Counter()

    def admits(self, turn: Turn) -> bool:
        """Return True if the turn's routes can be replayed; otherwise log and count the reason."""
        routing = self._routing
        if routing is None:
            return True
        tokens = len(turn.prompt_ids) + len(turn.sampled_ids) - 1  # the last token predicts nothing
        try:
            ids_TLk = codec.decode(
                turn.routes, experts=routing.experts, layers=routing.layers, top_k=routing.top_k, tokens=tokens
            )
            codec.check(ids_TLk, experts=routing.experts, layers=routing.layers, top_k=routing.top_k)
        except BadRoutes as error:
            _LOG.warning("turn %s is left out: %s", turn.id, error)
            self._counts[f"router_refused_{error.reason}"] += 1
            return False
        self._known[turn.id] = ids_TLk[:tokens]
        return True

    def lay_out(self, packed: PackedBatch, turns: Sequence[Turn]) -> Routes | None:
        """Return the routes of a micro-batch of admitted turns; None if nothing is replayed."""
        if self._routing is None:
            return None
        routes = lay_out(packed, [self._known[turn.id] for turn in turns])
        self._counts["router_disagreements"] += routes.disagreements
        return routes

    @contextmanager
    def replaying(self, routes: Routes | None) -> Generator[None]:
        """Replay routes during one forward pass and its backward pass, which may recompute activations and must see the same routes."""
        if self._routing is None or routes is None:
            yield
            return
        with self._routing.replay(routes.ids_NLk, plausible=self._plausible) as replay:
            yield
        self._replayed["router_routed"] += replay.routed
        self._replayed["router_flips"] += replay.flips
        self._replayed["router_implausible"] += replay.implausible

    def start_over(self) -> None:
        """Reset the replay counts, because the same micro-batches are going to be replayed again."""
        self._replayed.clear()

    def settle(self) -> dict[str, float]:
        """Return the counts since the last call, and forget the turns. They count (token, layer) pairs; `router_refused_*` counts turns."""
        found = {name: float(count) for name, count in {**self._counts, **self._replayed}.items()}
        self._counts.clear()
        self._replayed.clear()
        self._known.clear()
        return found


# ---------------------------------------------------------------- logit edits


class AnswerEdits:
    """Reconstructs the logit edits of turns.

    Args:
        load: returns the grammars of the model's tokenizer; called once, when the first turn needs them.

    Example::

        edits = AnswerEdits(lambda: HFRenderer(path).grammars)
        usable = [turn for turn in turns if edits.admits(turn)]
        edits.replay(usable, 0, 512)  # {3: Edit(...), ...}: by sampled token, turn after turn
    """

    def __init__(self, load: Callable[[], Grammars]) -> None:
        self._load = load
        self._grammars: Grammars | None = None
        self._bases: dict[str, Basis] = {}
        self._kls: dict[tuple[str, int], float] = {}  # from the last pass over each steered token
        self._over_cap = set[tuple[str, int]]()

    def set_bases(self, rows: Iterable[SteeringBasis]) -> None:
        """Set the bases that the next turns were steered by, replacing the previous ones."""
        self._bases = {}
        for row in rows:
            try:
                self._bases[row.hash] = row.basis()
            except ValueError as error:
                _LOG.warning("a basis in the log cannot be used: %s", error)

    def knows_basis(self, turn: Turn) -> bool:
        """Return True if the turn was not steered, or its steering can be replayed; otherwise log the reason."""
        try:
            self._steering(turn)
        except ValueError as error:
            _LOG.warning("turn %s is left out: %s", turn.id, error)
            return False
        return True

    def admits(self, turn: Turn) -> bool:
        """Return True if the turn's tokens were drawn from the model's own logits, or from edited ones that can be reconstructed."""
        try:
            editor, nuclei = self._editor(turn), _nuclei(turn)
        except (BadRequest, ValueError) as error:
            _LOG.warning("turn %s is left out: %s", turn.id, error)
            return False
        for place, token in enumerate(turn.sampled_ids):
            allowed = None if editor is None else editor.edit().allowed
            if allowed is not None and not allowed[token >> 3] >> (token & 7) & 1:
                _LOG.warning("turn %s is left out: its grammar, as read here, does not allow token %d", turn.id, token)
                return False
            if nuclei is not None and token not in nuclei[place]:
                _LOG.warning("turn %s is left out: its nucleus does not hold token %d", turn.id, token)
                return False
            if editor is not None:
                editor.take(token)
        return True

    def replay(self, turns: Sequence[Turn], start: int, stop: int) -> Mapping[int, Edit]:
        """Return the edits of the sampled tokens [start, stop), counted over all turns; tokens without an edit are left out.

        Callers request one part at a time: for long answers, all edits at once would take more memory than everything else.
        """
        made: dict[int, Edit] = {}
        first = 0
        for turn in turns:
            end = first + len(turn.sampled_ids)
            needed = first < stop and end > start
            editor, nuclei = (self._editor(turn), _nuclei(turn)) if needed else (None, None)
            steering, steered = (self._steering(turn), turn.steered) if needed else (None, None)
            until = first if steering is None or steered is None else first + steered.end
            gaps = set() if steered is None else {first + k for start, stop in steered.gaps for k in range(start, stop)}
            if editor is not None or nuclei is not None or until > start:
                for place, token in enumerate(turn.sampled_ids[: stop - first], first):
                    if place >= start:
                        edit = UNEDITED if editor is None else editor.edit()
                        edit = edit if nuclei is None else replace(edit, allowed=_allowed_mask(nuclei[place - first]))
                        if steering is not None and place < until and place not in gaps:
                            saw = partial(self._record_kl, (turn.id, place - first), steering.cap)
                            edit = replace(edit, steering=replace(steering, on_token=saw))
                        if edit is not UNEDITED:
                            made[place] = edit
                    if editor is not None:
                        editor.take(token)
            first = end
        return made

    def _record_kl(self, place: tuple[str, int], cap: float, token: SteeredToken) -> None:
        self._kls[place] = token.kl
        if token.kl > cap:
            self._over_cap.add(place)

    def settle(self) -> dict[str, float]:
        """Return metrics of the steered tokens since the last call: their number, their mean KL(steered || base) in nats as recomputed
        here, and how many exceeded their cap.
        """
        kls, over = self._kls, self._over_cap
        self._kls, self._over_cap = {}, set()
        mean = sum(kls.values()) / max(1, len(kls))
        return {"steered_tokens": float(len(kls)), "steered_kl": mean, "steered_over_cap": float(len(over))}

    def _steering(self, turn: Turn) -> LogitSteering | None:
        """Return the steering of the logits of the turn's steered tokens. Raises ValueError if it cannot be determined."""
        steered = turn.steered
        if steered is None:
            return None
        if fault := steered.fault(len(turn.sampled_ids)):
            raise ValueError(f"its steering by {steered.basis} cannot be as recorded: {fault}")
        if not steered.tokens:
            return None
        basis = self._bases.get(steered.basis)
        if basis is None:
            raise ValueError(f"the basis {steered.basis} of its steering is not known")
        if len(basis.names) != len(steered.dials) or len(steered.features) not in (0, len(basis.names)):
            raise ValueError(f"its steering by {steered.basis} does not fit the basis")
        return LogitSteering.of(basis, steered.dials, steered.cap, turn.sampling.temperature, steered.clip)

    def _editor(self, turn: Turn) -> LogitEditor | None:
        """Return the turn's editor, None if its logits were not edited. Raises BadRequest."""
        if turn.sampling.grammar and self._grammars is None:
            self._grammars = self._load()
        return LogitEditor.of(turn.sampling, self._grammars)


def _nuclei(turn: Turn) -> list[nucleus.Ids] | None:
    """Return the ids allowed for each sampled token, including a grammar's masks; None if `top_p` excluded none. Raises ValueError."""
    if turn.sampling.top_p == 1.0 or turn.sampling.temperature == 0.0:
        return None
    return nucleus.decode(turn.nucleus, len(turn.sampled_ids))


def _allowed_mask(ids: nucleus.Ids) -> NDArray[np.uint8]:
    """Return a bit mask as `Edit.allowed`, up to the largest of these ascending ids."""
    open_V = np.zeros(int(ids[-1]) + 1, np.bool_)
    open_V[ids] = True
    return np.packbits(open_V, bitorder="little")
