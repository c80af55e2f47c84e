"""What a report says of the gate: the looks, what was proven better, what the suite can resolve; rows of earlier versions included."""

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.status.observed_run import Observed, gates, proven, resolution, summary

V0, V3, V5, V8 = (PolicyVersion(number=n, hash=f"{n:02d}" * 16) for n in (0, 3, 5, 8))
OLD = {
    "difference": 0.02, "lower": -0.03, "upper": 0.07, "margin": 0.05, "power": 0.8, "items": 96, "draws": 4, "verdict": "SHIP",
}  # fmt: skip


def event(action, policy, previous, detail=None):
    return ReleaseEvent(
        id=f"{action}{policy.number}", action=action, policy=policy, previous=previous, reason="", detail=detail or {}, at=9.0
    )  # fmt: skip


def looked(policy, previous, **more):
    return event("evaluated", policy, previous, {"report": OLD | more})


def test_releases_that_were_proven_better_are_counted_and_the_last_resolution_is_shown():
    seen = Observed(
        releases=[
            event("shipped", V0, None),
            looked(V3, V0),
            event("shipped", V3, V0),
            looked(V5, V3, better=True, smallest_margin=0.114),
            event("shipped", V5, V3),
            looked(V8, V5, better=True, smallest_margin=0.108),
        ]
    )
    assert [release.policy for release in proven(seen)] == [V5], "what did not ship is no release"
    assert resolution(seen) == 0.108
    rows = dict(summary(seen, [], []))
    assert rows["releases shipped"] == "2, of these proven better than the best before: 1"
    assert rows["smallest total loss that the gate can rule out"].startswith("10.8 pp")
    assert [gate.margin for gate in gates(seen, 0.0)] == [0.05] * 3


def test_a_run_of_an_earlier_version_is_shown_without_what_it_did_not_note():
    seen = Observed(releases=[event("shipped", V0, None), looked(V3, V0), event("shipped", V3, V0)])
    assert (proven(seen), resolution(seen), resolution(Observed())) == ([], None, None)
    assert "smallest total loss that the gate can rule out" not in dict(summary(seen, [], []))
