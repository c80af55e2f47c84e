from ostinato.serve.outside_models import Breaker


def failed(breaker, now, times=1):
    for _ in range(times):
        breaker.begin()
        breaker.end(now, well=False)


def a_breaker():
    return Breaker(failures=3, rest_s=10.0, longest_s=25.0)


def test_failures_in_a_row_give_it_a_rest():
    breaker = a_breaker()
    failed(breaker, 0.0, 2)
    assert breaker.allows(0.0)
    failed(breaker, 0.0)
    assert not breaker.allows(9.9)
    assert breaker.allows(10.0)


def test_a_success_between_failures_starts_the_count_anew():
    breaker = a_breaker()
    failed(breaker, 0.0, 2)
    breaker.begin()
    breaker.end(0.0, well=True)
    failed(breaker, 0.0, 2)
    assert breaker.allows(0.0)


def test_after_the_rest_one_call_at_a_time_tries_again():
    breaker = a_breaker()
    failed(breaker, 0.0, 3)
    breaker.begin()
    assert not breaker.allows(11.0)
    breaker.end(11.0, well=None)  # the client left: nothing is known, and the next may try
    assert breaker.allows(11.0)
    assert breaker.resting
    breaker.begin()
    breaker.end(12.0, well=True)
    assert not breaker.resting
    breaker.begin()
    assert breaker.allows(12.0)


def test_each_failed_trial_doubles_the_rest_up_to_the_longest():
    breaker = a_breaker()
    failed(breaker, 0.0, 3)
    failed(breaker, 10.0)
    assert not breaker.allows(29.9)
    assert breaker.allows(30.0)
    failed(breaker, 30.0)
    assert not breaker.allows(54.9)
    assert breaker.allows(55.0)


def test_calls_that_fail_while_it_rests_do_not_lengthen_the_rest():
    breaker = a_breaker()
    for _ in range(6):
        breaker.begin()
    for _ in range(6):
        breaker.end(0.0, well=False)
    assert breaker.allows(10.0)
