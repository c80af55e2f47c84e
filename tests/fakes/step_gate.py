"""Holds the thread of an embedded engine between two steps, so that streams are open for as long as a test needs them."""

import threading


class StepGate:
    """After `steps` steps that gave tokens the thread goes on only to carry out an order, with one step for each, until the block ends.

    Example::

        with StepGate(tiny.engine):
            await anext(stream)
            await tiny.engine.unload("live")  # the stream is open, however long this took to come
    """

    def __init__(self, engine, steps=1):
        self._worker, self._left, self._open = engine._worker, steps, threading.Event()
        self._flush = self._worker._flush

    def __enter__(self):
        self._worker._flush = self._flushed
        return self

    def __exit__(self, *_):
        self._open.set()

    def _flushed(self, outbox):
        self._flush(outbox)
        self._left -= 1
        worker = self._worker
        while self._left <= 0 and not worker._stopping and worker.posted <= worker.counters["orders_done"]:
            if self._open.wait(0.001):
                return
