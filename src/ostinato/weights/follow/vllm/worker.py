"""What the driver asks each worker of a vLLM server beside vLLM's own protocol: to fetch ahead, and how far it is."""

from __future__ import annotations

from typing import Any


class StagingWorker:
    """vLLM mixes this class into its workers (``--worker-extension-cls``); ``/collective_rpc`` reaches its methods."""

    weight_transfer_engine: Any

    def ostinato_stage(self, root: str) -> dict[str, Any]:
        """Begin to fetch and verify a version beside the serving; returns what `ostinato_status` does."""
        return self._ostinato_engine().stage(root)

    def ostinato_status(self) -> dict[str, Any]:
        """The version that is staged, and how far; the one that is served ("" before the first); what is broken, if anything."""
        return self._ostinato_engine().status()

    def _ostinato_engine(self) -> Any:
        engine = self.weight_transfer_engine
        if not hasattr(engine, "stage"):
            raise RuntimeError('start vLLM with --weight-transfer-config \'{"backend": "ostinato"}\'')
        return engine
