"""A server's token events -> the chunks of one request, each token attributed to the version that made it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from ostinato.core.generation import Chunk, Generate, Tops
from ostinato.core.records import Finish, PolicyVersion
from ostinato.engine.text import shown
from ostinato.engine.vllm.wire import WireChoice
from ostinato.model.stream import TextStream

_LOG = logging.getLogger(__name__)


class _Sample:
    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.tokens = 0
        self.runs: list[tuple[str, int]] = []  # (hash, first token) of each run of tokens of one version
        self.ended = False

    def spans(self) -> list[tuple[str, int, int]]:
        """(hash, first token, end) of each run."""
        ends = [start for _, start in self.runs[1:]] + [self.tokens]
        return [(hash, start, end) for (hash, start), end in zip(self.runs, ends, strict=True)]


class OpenAnswer:
    """The samples of one request. `take` processes the server's events; `end` ends the samples that the server did not finish.

    A token's version is the one its slot held when it arrived; the server reports its own account only on a sample's last event. If the
    two differ the sample ends with `Finish.ERROR`, because tokens of unknown origin must not be trained on.
    """

    def __init__(
        self, request: Generate, seed: int, *, stop_ids: Set[int], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._request, self._seed, self._stop_ids = request, seed, stop_ids
        self._samples = [_Sample(TextStream(decode, request.sampling.stop)) for _ in range(request.n)]

    @property
    def missing(self) -> int:
        """Samples that have not ended."""
        return sum(not sample.ended for sample in self._samples)

    def take(self, choice: WireChoice, policy: PolicyVersion) -> Chunk | None:
        """The chunk for new tokens, made by `policy`. None if they arrive after their sample's end."""
        if choice.index >= len(self._samples) or self._samples[choice.index].ended:
            return None
        sample = self._samples[choice.index]
        if choice.ids and (not sample.runs or sample.runs[-1][0] != policy.hash):
            sample.runs.append((policy.hash, sample.tokens))
        text, finish, used = "", None, 0
        for token in choice.ids:
            used += 1
            sample.tokens += 1
            more, finish = shown(
                sample.text, token, self._stop_ids, last=sample.tokens == self._request.sampling.max_tokens
            )
            text += more
            if finish is not None:
                break
        if finish is None and choice.finish_reason is not None:
            finish = {"stop": Finish.STOP, "length": Finish.LENGTH}.get(choice.finish_reason, Finish.ERROR)
            text += sample.text.flush()
        if finish is not None and not self._as_told(sample, choice):
            finish = Finish.ERROR
        sample.ended = finish is not None
        tops = choice.tops(self._request.tops)[:used]
        chunk = self._chunk(choice.index, choice.ids[:used], choice.values[:used], policy, text, finish, tops)
        return chunk if finish in (None, Finish.ERROR) else replace(chunk, routes=choice.routes)

    def end(self, finish: Finish, policy: PolicyVersion) -> list[Chunk]:
        """The last chunks of all samples that have not ended. At a deadline, a sample that saw a swap ends with `Finish.ERROR`, because the
        server's account of which version made which token has not arrived, and will not.
        """
        chunks: list[Chunk] = []
        for index, sample in enumerate(self._samples):
            if sample.ended:
                continue
            sample.ended = True
            last, text = finish, ""
            if finish is Finish.DEADLINE:
                text = sample.text.flush()
                last = Finish.ERROR if len(sample.runs) > 1 else Finish.STOP if sample.text.stopped else finish
            chunks.append(self._chunk(index, (), (), policy, text, last))
        return chunks

    def _as_told(self, sample: _Sample, choice: WireChoice) -> bool:
        """Whether the server's account of the versions matches ours. If we see the end before the server does, there is no account yet, and
        only a sample that saw no swap is accepted.
        """
        if choice.finish_reason is None:  # we saw the end before the server
            return len(sample.runs) <= 1
        told = [
            (span.version, span.start, min(span.end, sample.tokens))
            for span in choice.weight_versions or ()
            if span.start < min(span.end, sample.tokens)
        ]
        if told != sample.spans():
            _LOG.error(
                "request %s: its tokens were made by %s, says the server, and not by %s; the answer ends as an error",
                self._request.id,
                told or "versions that it does not name",
                sample.spans(),
            )
        return told == sample.spans()

    def _chunk(
        self,
        index: int,
        ids: Sequence[int],
        logprobs: Sequence[float],
        policy: PolicyVersion,
        text: str,
        finish: Finish | None,
        tops: tuple[Tops, ...] = (),
    ) -> Chunk:
        return Chunk(
            index=index,
            ids=tuple(ids),
            logprobs=tuple(logprobs),
            policy=policy,
            text=text,
            finish=finish,
            seed=self._seed,
            tops=tops,
        )
