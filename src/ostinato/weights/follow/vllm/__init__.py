"""A vLLM plugin that loads new weights from a weight store while vLLM serves.

The rest of Ostinato does not import this package. It runs in vLLM's processes, which find it by the entry point ``vllm.general_plugins``.
Besides vLLM it needs blake3, cryptography, numba, obstore, pydantic and zstandard. Start the server like this::

    VLLM_SERVER_DEV_MODE=1 vllm serve DIRECTORY --weight-transfer-config '{"backend": "ostinato"}' \
        --worker-extension-cls ostinato.weights.follow.vllm.worker.StagingWorker

and let ``ostinato weights drive-vllm URL`` follow a ref.
"""

from __future__ import annotations

BACKEND = "ostinato"


def register() -> None:
    """Register the backend in this vLLM process. vLLM calls this in every process. Idempotent."""
    import contextlib

    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    with contextlib.suppress(ValueError):  # registered before
        WeightTransferEngineFactory.register_engine(BACKEND, "ostinato.weights.follow.vllm.engine", "StoreEngine")
