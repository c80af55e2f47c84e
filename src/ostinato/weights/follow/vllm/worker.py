"""Worker methods that the driver calls in addition to vLLM's own protocol: fetch a version ahead of time, and report its status."""

from __future__ import annotations

from typing import Any


class StagingWorker:
    """vLLM mixes this class into its workers (``--worker-extension-cls``); ``/collective_rpc`` reaches its methods."""

    weight_transfer_engine: Any

    def ostinato_stage(self, root: str) -> dict[str, Any]:
        """Start to fetch and verify a version while serving. Returns the same as `ostinato_status`."""
        return self._ostinato_engine().stage(root)

    def ostinato_status(self) -> dict[str, Any]:
        """Return the staged version and its status, the served version ("" before the first), and what is broken, if anything."""
        return self._ostinato_engine().status()

    def _ostinato_engine(self) -> Any:
        engine = self.weight_transfer_engine
        if not hasattr(engine, "stage"):
            raise RuntimeError('start vLLM with --weight-transfer-config \'{"backend": "ostinato"}\'')
        return engine
