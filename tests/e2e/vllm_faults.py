"""A worker extension for vLLM that can make the loader fail half-way. It runs in vLLM's processes, not in the test's."""

from itertools import islice

from ostinato.weights.follow.vllm.worker import StagingWorker


class FaultyWorker(StagingWorker):
    def ostinato_fail_next_load(self, after):
        """The next load fails after `after` tensors; the one after it is the model's own again."""
        model = self.weight_transfer_engine.model
        original = model.load_weights

        def fail(tensors):
            del model.load_weights
            original(islice(tensors, int(after)))
            raise RuntimeError("planted: the loader failed")

        model.load_weights = fail
