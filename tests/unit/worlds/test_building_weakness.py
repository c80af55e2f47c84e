from ostinato.worlds.building.attempts import SelectedTests, find_passing_stubs, stubs
from ostinato.worlds.building.mutations import functions_of
from ostinato.worlds.building.runs import SuiteRun

SOURCE = '''
class Scale:
    def of(self, value, by=2):
        """How it is written."""
        def helper():
            return 1
        return helper() * value + by

    def reset(self):
        self.value = 1
        return None

    async def wait(self, seconds):
        return await seconds

    def steps(self, to):
        for step in range(to):
            yield step
        return to

    @staticmethod
    def nested(*, key):
        def inner():
            yield key
        return inner
'''
OF, RESET, WAIT, STEPS, NESTED = functions_of("scale.py", SOURCE)


def names(function):
    return list(stubs(function.block(SOURCE)))


def test_stubs_fit_what_the_function_gives_back():
    assert {"None", "False", "True", '""', "[]", "{}"} < set(names(OF))
    assert "value" in names(OF)  # what it must be given
    assert {"self", "by"}.isdisjoint(names(OF))
    assert names(RESET) == ["None"]  # it gives nothing back
    assert "seconds" in names(WAIT)
    assert names(STEPS) == ["None", "iter(())"]  # who asks for steps gets none
    assert "key" not in names(NESTED)  # given by name
    assert "True" in names(NESTED)  # the function within yields, not it


def test_a_stub_keeps_signature_and_docstring():
    for returns, block in stubs(OF.block(SOURCE)).items():
        (changed, *_) = functions_of("scale.py", OF.replaced(SOURCE, block))
        assert (changed.signature, changed.docstring) == (OF.signature, OF.docstring)
        assert changed.block(OF.replaced(SOURCE, block)).strip().endswith(f"return {returns}")


class Runs:
    """Says of each job what `passes` gives for its function and what the stub returns; keeps the jobs."""

    def __init__(self, passes):
        self.passes = passes
        self.jobs = []

    async def run(self, jobs, seed):
        self.jobs += jobs
        outcomes = []
        for job in jobs:
            passed = self.passes.get(job.id, ())
            if passed is None:
                outcomes.append(None)
                continue
            ended = {test: "passed" if test in passed else "failed" for test in job.tests}
            outcomes.append(SuiteRun(ended=ended, code=0))
        return outcomes


def asked(function, lazy=frozenset({"t.py::a"})):
    return SelectedTests(function=function, tests=("t.py::a", "t.py::b"), targets=("t.py",), seconds=0.5, lazy=lazy)


async def found(passes, *each, bare=frozenset()):
    runs = Runs(passes)
    without = {"scale.py::Scale.of": bare}
    return await find_passing_stubs(runs, {"scale.py": SOURCE}, each, without), runs.jobs


async def test_a_stub_that_passes_every_test_is_named_and_one_that_passes_some_is_not():
    passes = {"scale.py::Scale.of False": ("t.py::a",), "scale.py::Scale.of True": ("t.py::a", "t.py::b")}
    cheap, jobs = await found(passes, asked(OF), asked(WAIT))
    assert cheap == ["return True", ""]
    assert {job.most_failing for job in jobs} == {0}
    assert {job.tests for job in jobs} == {("t.py::a", "t.py::b")}
    assert {job.targets for job in jobs} == {("t.py",)}
    assert len({job.group for job in jobs}) == 2


async def test_a_stub_that_got_no_answer_or_did_not_end_passes_nothing():
    cheap, _ = await found({"scale.py::Scale.of False": None}, asked(OF))
    assert cheap == [""]


async def test_doing_nothing_is_not_tried_again_where_it_is_known_to_fail():
    for lazy, tried in (({"t.py::a"}, False), ({"t.py::other"}, True), (None, False)):
        _, jobs = await found({}, asked(OF, lazy=None if lazy is None else frozenset(lazy)))
        assert ("scale.py::Scale.of None" in {job.id for job in jobs}) is tried


async def test_tests_that_pass_without_the_function_cost_no_run():
    cheap, jobs = await found({}, asked(OF), bare=frozenset({"t.py::a", "t.py::b", "t.py::c"}))
    assert (cheap, jobs) == (["nothing in its place"], [])
    cheap, jobs = await found({}, asked(OF), bare=frozenset({"t.py::a"}))
    assert cheap == [""]
    assert jobs
