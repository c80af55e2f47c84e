"""Every rollout comes back from ATIF as it was, and Harbor's own models take what is written."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.atif import atif_of
from tests.fakes.harbor import harbor_reads, needs_harbor
from tests.fakes.tasks import messages, texts

from ostinato.core.errors import BadConfig
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.outcome_files import rollout_of

_changes = st.builds(
    Change, path=texts, kind=st.sampled_from(ChangeKind), data=st.binary(max_size=20), executable=st.booleans()
)
rollouts = st.builds(
    Rollout,
    task=texts,
    harness=texts,
    ended=st.sampled_from(Ended),
    messages=st.lists(messages, min_size=1, max_size=6).map(tuple),
    turns=st.lists(texts, max_size=4).map(tuple),
    changes=st.lists(_changes, max_size=2).map(tuple),
    effort=st.dictionaries(texts, st.floats(0, 1e9), max_size=2),
    detail=st.dictionaries(texts, texts, max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(rollouts)
def test_a_rollout_comes_back(rollout):
    text = json.dumps(atif_of(rollout, version="0.1"), allow_nan=False)
    assert rollout_of(json.loads(text)) == rollout


@given(
    st.recursive(
        st.none() | st.integers() | texts,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["schema_version", "extra", "steps", "agent", "ostinato"]), inner, max_size=4
            )
        ),
    )
)
def test_what_is_no_rollout_of_ours_is_refused_by_name(value):
    refused = False
    try:
        rollout_of(value)
    except BadConfig:
        refused = True
    assert refused


@needs_harbor
def test_harbor_takes_what_is_written():
    made = []

    @settings(max_examples=60, deadline=None, database=None)
    @given(rollouts)
    def collect(rollout):
        made.append(atif_of(rollout, version="0.1", episode="e", model="m"))

    collect()
    for theirs, ours in zip(harbor_reads(*(("trajectory", each) for each in made)), made, strict=True):
        assert rollout_of(theirs) == rollout_of(ours)
