"""The interface of master weights: whole in one process (`masters`), or divided over ranks (`sharding.masters`)."""

from __future__ import annotations

from typing import Protocol

from ostinato.core.weights import WeightPart, Weights
from ostinato.train.checkpoint import Arrays, Checkpoint
from ostinato.train.pieces import RankPart


class MasterWeights(Protocol):
    """fp32 weights, their summed gradients and AdamW's moments, beside the compute model that holds the published rounding.

    Where there are several ranks, all of them call the same methods in the same order.
    """

    def clear_grads(self) -> None:
        """Forget gradient sums, half-finished ones included."""
        ...

    def grad_norm(self) -> float:
        """Global L2 norm of the summed gradient; NaN or infinite if any entry is."""
        ...

    def momentum_product(self) -> float:
        """Inner product of the summed gradient with AdamW's momentum, the mean of earlier gradients."""
        ...

    def update(self, *, learning_rate: float, scale: float) -> None:
        """One AdamW step with the gradient times `scale`; then the compute model holds the new rounding."""
        ...

    def set_steps(self, steps: int) -> None:
        """Tell AdamW how many steps its moments have seen."""
        ...

    def forget_mean(self) -> None:
        """Drop the momentum, AdamW's first moment."""
        ...

    def put(self, weights: Weights) -> None:
        """Write other weights into the compute model until `round_into_model`. Raises BadWeights, with the model unchanged."""
        ...

    def round_into_model(self) -> None:
        """Write the published rounding of the masters into the compute model."""
        ...

    def take_from_model(self) -> None:
        """Make the compute model's weights the masters."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of the whole."""
        ...

    def arrays(self) -> tuple[Arrays, Arrays, RankPart | None]:
        """Views of the masters and of AdamW's moments, and which rows of them this rank has; None: all."""
        ...

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take the masters and moments of a checkpoint of this model, whatever the number of ranks that wrote it."""
        ...

    def publish(self) -> Weights | WeightPart:
        """The masters in the published dtypes as fresh bytes; with several ranks, this rank's part of them."""
        ...

    def gather(self) -> Weights:
        """The masters in the published dtypes, all of them; on a rank other than the first there are none."""
        ...
