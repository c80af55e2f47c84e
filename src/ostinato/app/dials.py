"""The fit of a run's dials: the live version answers prompts of nobody's, and directions in logit space are fitted to its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ostinato.adapt.fit import ATTRIBUTES, FittedBasis, fit_basis, steerable
from ostinato.app.gateway import open_embedded
from ostinato.app.numerics import compute
from ostinato.app.storage import Run, model_path
from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, Sampling
from ostinato.core.seams import Engine
from ostinato.core.weights import Snapshot

_AT_ONCE = 128  # answers that are sampled at the same time
_JUDGED = 8  # one answer in so many says which tokens are likely
Told = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and how much there is."""


async def fit_live(
    run: Run, prompts: Sequence[str], *, each: int, tokens: int, seed: int, on_progress: Told
) -> FittedBasis:
    """Fit a basis to the version that is live, from `each` answers of at most `tokens` tokens to each prompt. Imports torch.

    Writes nothing. Raises NotFound without a live version, BadConfig for a model without a chat template, and if nothing can be steered.
    """
    from ostinato.model.config import backend
    from ostinato.model.load import build
    from ostinato.model.renderer import HFRenderer
    from ostinato.model.steering import mean_probabilities, score_features

    config = run.config
    live = await run.follower.resolve("live")
    if live is None:
        raise NotFound("no version is live: start the run with `ostinato up` first")
    path = await asyncio.to_thread(model_path, config)
    renderer = HFRenderer(path)
    if not renderer.chats:
        raise BadConfig("model.source has no chat template, and the prompts of a fit are messages: use a chat model")
    weights = await run.follower.fetch(live)
    asked = [tuple(renderer.chat(Conversation(messages=(Message(role=Role.USER, text=each),)))) for each in prompts]
    engine = await open_embedded(config, path, renderer)
    await engine.start()
    try:
        await engine.load("live", Snapshot(policy=live, weights=weights))
        sampling = Sampling(max_tokens=tokens, seed=seed)
        answers = await _answers(engine, asked, sampling, each, on_progress)
    finally:
        await engine.close()

    def fit() -> FittedBasis:
        model = build(path, compute(config), backend(config.model))(weights)
        pairs = [(asked[prompt], ids) for prompt, ids, _ in answers]
        tokens_M = steerable(mean_probabilities(model, pairs[::_JUDGED]), renderer.reserved_ids())
        features_NM = score_features(
            model, pairs, tokens_M, lambda done: on_progress("score features", done, len(pairs))
        )
        texts = [(renderer.decode(ids), finish is Finish.STOP) for _, ids, finish in answers]
        measured = {name: [measure(*answer) for answer in texts] for name, measure in ATTRIBUTES.items()}
        return fit_basis(features_NM, measured, [prompt for prompt, _, _ in answers], tokens_M, live.hash)

    return await asyncio.to_thread(fit)


async def _answers(
    engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: Sampling, each: int, on_progress: Told
) -> list[tuple[int, tuple[int, ...], Finish]]:
    """Of each answer the number of its prompt, its ids, and how it ended."""
    gate, done = asyncio.Semaphore(max(1, _AT_ONCE // each)), 0

    async def ask(number: int) -> list[tuple[int, tuple[int, ...], Finish]]:
        nonlocal done
        ids: list[list[int]] = [[] for _ in range(each)]
        ends = [Finish.ERROR] * each
        request = Generate(
            id=f"fit-{number}", slot="live", prompt_ids=prompts[number], sampling=sampling, n=each, cache_salt="fit"
        )
        async with gate:
            async for chunk in engine.generate(request):
                ids[chunk.index] += chunk.ids
                ends[chunk.index] = chunk.finish or ends[chunk.index]
        done += each
        on_progress("answers", done, each * len(prompts))
        return [(number, tuple(own), end) for own, end in zip(ids, ends, strict=True) if end.trainable and own]

    return [answer for some in await asyncio.gather(*map(ask, range(len(prompts)))) for answer in some]
