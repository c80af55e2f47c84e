"""A turn that Auto dealt, and one that a model outside answered, come back from the log as they were."""

from dataclasses import replace

from ostinato.core.records import Arm, Pick, Turn
from ostinato.record.codec.kinds import TURNS, load
from ostinato.record.log import SqlLog
from ostinato.testing.records import a_turn


async def test_a_draw_and_an_answer_without_tokens_come_back(tmp_path):
    dealt = replace(a_turn("a:0"), auto=Pick(arm="live", odds={"live": 0.7, "far": 0.3}, cost=0.0))
    outside = replace(
        a_turn("b:0"),
        arm=Arm.OUTSIDE,
        sampled_ids=(),
        logprobs=(),
        spans=(),
        text="from afar",
        auto=Pick(arm="far", odds={"live": 0.7, "far": 0.3}),
    )
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(dealt, outside, a_turn("c:0"))
        assert [row async for _, row in log.read(0, {Turn})] == [dealt, outside, a_turn("c:0")]


def test_a_row_of_before_has_no_draw_and_no_window():
    body = TURNS.body[: TURNS.body.index("auto")]
    values = [
        "a:0",
        "e",
        None,
        "ann",
        "default",
        "live",
        1.0,
        [64, 1.0, 1.0, [], None],
        "stop",
        9.0,
        10.0,
        "",
        None,
        False,
    ]
    assert len(values) == len(body)
    assert not {"auto", "window"} & load(TURNS, TURNS.body, values).keys()
