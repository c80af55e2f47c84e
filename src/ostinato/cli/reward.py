"""`ostinato reward`: backtests a reward function on a run's log before it is used."""

from __future__ import annotations

import asyncio

from cyclopts import App
from rich.console import Console

from ostinato.cli.options import DEFAULTS, Common, Count, Flag, Words

reward = App(name="reward", help="Try a reward function on the turns of a run's log.")


@reward.command(name="try")
def try_reward(
    function: str = "",
    *,
    option: Words = (),
    since: str | None = None,
    limit: Count = 2000,
    show: Count = 10,
    text: Flag = False,
    json: Flag = False,
    common: Common = DEFAULTS,
) -> None:
    """Run a reward function over the turns in a run's log, beside the rewards in use. Nothing is written, so `up` may be running.

    The function runs in a process of its own, with the limits of `reward`. It is called when the run would have called it, with the signals
    received by then: one that does not wait for its window decides before people have reacted. Turns on which it raises, hangs or returns
    nonsense are counted by message; after five hangs or crashes it is not called again. Rewards in use are those that the log records;
    where it has none yet, the function in use is called, too.

    For example: `ostinato reward try ostinato.reward.functions:agent --option silence=0.0 --since 7d`

    Parameters
    ----------
    function
        As module:function, found like `reward.function`. Default: the one in use, to try other options.
    option
        A keyword argument of it, as in --option window=600; may be repeated. The function in use keeps its `reward.options` besides.
    since
        Only turns that ended in the last 90min, 12h, 7d or 2w.
    limit
        The newest turns of people. 0: all.
    show
        How many of the turns whose rewards change most to show, with their signals.
    text
        Show these turns' answers, too, if the keys of their people still exist.
    json
        Print one JSON object instead of the tables.
    """
    from ostinato.core.durations import seconds_in
    from ostinato.launch.commands.reward import try_reward as run

    span = None if since is None else seconds_in(since)
    asyncio.run(
        run(
            common.of_run(),
            function,
            option,
            since=span,
            limit=limit,
            examples=show,
            text=text,
            machine=json,
            console=Console(),
        )
    )
