"""However askers come and go, every step computes something, nobody's share is exceeded beside others, and every sample ends."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.engine.embedded.kv import BlockPool
from ostinato.engine.embedded.scheduler import Generation, Scheduler

V1 = PolicyVersion(number=1, hash="v1")
BLOCK = 16

arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps after the one before
        st.sampled_from("abc"),
        st.integers(1, 12),  # samples
        st.integers(1, 90),  # tokens of the prompt
        st.integers(1, 20),  # tokens of the answer
    ),
    min_size=1,
    max_size=12,
)


def samples(salt, count, prompt, answer):
    request = Generate(
        id="r", slot="live", prompt_ids=(1,) * prompt, sampling=Sampling(max_tokens=answer), n=count, cache_salt=salt
    )
    made = [Generation(request=request, index=n, seed=0, ids=list(request.prompt_ids), policy=V1) for n in range(count)]
    for each in made[1:]:
        each.leader = made[0]
    return made


@given(arrivals, st.integers(1, 6), st.integers(4, 24), st.integers(12, 60), st.sampled_from([16, 32, 64]))
def test_every_sample_ends_and_no_step_is_empty_or_unfair(asked, share, rows, blocks, chunk):
    scheduler = Scheduler(BlockPool(blocks), block=BLOCK, rows=rows, chunk=chunk, share=share)
    everything, longest = [], 0
    for gap, salt, count, prompt, answer in asked:
        for _ in range(gap):
            advance(scheduler, share, chunk)
        made = samples(salt, count, prompt, answer)
        scheduler.add(made)
        everything += made
        longest += count * (prompt + answer)
    for _ in range(20 * longest):  # each step computes a token at least, and what is put back is computed again
        if not scheduler.samples():
            break
        advance(scheduler, share, chunk)
    assert all(each.sampled == each.request.sampling.max_tokens for each in everything)


def advance(scheduler, share, chunk):
    """One step, checked."""
    crowded = Counter(each.asker for each in scheduler.running)
    askers = crowded.keys() | {each.asker for each in scheduler.waiting}
    fewest = min(crowded.values(), default=0)
    was = set(scheduler.running)
    work = scheduler.plan()
    assert work or not scheduler.samples()
    went = Counter(piece.sample.asker for piece in work if piece.sample in was)
    tokens = Counter()
    for piece in work:
        tokens[piece.sample.asker] += piece.end - piece.start if piece.end - piece.start > 1 else 0
    if len(askers) > 1 and crowded:
        assert all(count <= max(share, fewest) for count in went.values())
        assert max(tokens.values(), default=0) <= max(BLOCK, chunk // len(crowded))
    for piece in work:
        scheduler.advance(piece)
        if piece.last:
            drawn = [piece.sample]
            if piece.sample.sampled == 0:
                drawn += [started for started, _, _ in scheduler.fork(piece.sample)]
            for each in drawn:
                each.ids.append(2)
                if each.sampled == each.request.sampling.max_tokens:
                    scheduler.remove(each)
