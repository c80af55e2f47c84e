"""Retries: what each part of the policy allows, on a clock that the tests move."""

import random

import pytest

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.retry import Backoff, RetryLater, RetryPolicy, retry, unavailable


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def pauses(policy, count, clock=None, **given):
    """The pauses after `count` failures, each of which comes at once after the pause before it."""
    clock, found = clock or Clock(), []
    backoff = Backoff(policy, clock=clock, **given)
    for _ in range(count):
        found.append(backoff.failed())
        clock.now += found[-1] or 0.0
    return found


def test_pauses_double_up_to_the_longest():
    assert pauses(RetryPolicy(pause_s=0.5, longest_s=3.0), 5) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_the_last_attempt_there_is_no_pause():
    assert pauses(RetryPolicy(pause_s=1.0, attempts=3), 3) == [1.0, 2.0, None]
    assert pauses(RetryPolicy(pause_s=1.0, attempts=1), 1) == [None]


def test_no_try_begins_later_than_the_total_time_after_the_first_failure():
    assert pauses(RetryPolicy(pause_s=1.0, total_s=7.0), 4) == [1.0, 2.0, 4.0, None]
    clock = Clock()
    backoff = Backoff(RetryPolicy(pause_s=1.0, total_s=7.0), clock=clock)
    clock.now += 1000.0  # however long the first try took
    assert backoff.failed() == 1.0


def test_jitter_shortens_a_pause_by_its_share_at_most_and_the_same_seed_gives_the_same_pauses():
    policy = RetryPolicy(pause_s=1.0, longest_s=1.0, jitter=0.25)
    found = pauses(policy, 200, rng=random.Random(1))
    assert found == pauses(policy, 200, rng=random.Random(1)) != pauses(policy, 200, rng=random.Random(2))
    assert 0.75 <= min(found) < 0.8 < 0.95 < max(found) <= 1.0


def test_what_the_other_side_says_is_waited_for_but_not_longer_than_the_longest_pause():
    backoff = Backoff(RetryPolicy(pause_s=1.0, longest_s=10.0), clock=Clock())
    assert backoff.failed(RetryLater("busy", 5.0)) == 5.0
    assert backoff.failed(RetryLater("busy", 0.1)) == 2.0
    assert backoff.failed(RetryLater("busy", 1e9)) == 10.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3"}, 3.0),
        ({"retry-after": "3", "Retry-After-Ms": "250"}, 0.25),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "\u0663"}, None),
        ({"Retry-After": "9" * 5000}, None),
        ({}, None),
    ],
)
def test_the_headers_of_an_answer_say_when(headers, seconds):
    error = unavailable("HTTP 503", headers)
    assert isinstance(error, Unavailable)
    assert getattr(error, "retry_after_s", None) == seconds


async def test_errors_of_the_kind_are_retried_and_others_raised_at_once():
    said, seen = [Unavailable("a"), Unavailable("b"), "done"], []

    async def ask():
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    policy = RetryPolicy(pause_s=0.0, attempts=3)
    assert await retry(ask, policy, on=Unavailable, failed=lambda error: seen.append(str(error))) == "done"
    assert seen == ["a", "b"]
    said[:] = [BadRequest("never"), "done"]
    with pytest.raises(BadRequest):
        await retry(ask, policy, on=Unavailable)
    assert said == ["done"]
    said[:] = [Unavailable(each) for each in "abcd"]
    with pytest.raises(Unavailable, match="c"):
        await retry(ask, policy, on=Unavailable)
