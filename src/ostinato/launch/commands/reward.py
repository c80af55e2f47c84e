"""`ostinato reward try`: backtests a reward function on a run's log and compares it with the rewards in use."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ostinato.app.storage import existing_home, open_log
from ostinato.app.trainer import taught_by
from ostinato.config import Config, parse_override
from ostinato.core.clock import wall_clock
from ostinato.core.durations import ago
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.records import Turn
from ostinato.core.seams import Log
from ostinato.launch.views.screen import bare_table, counting_bar, plain, say
from ostinato.record.config import Encrypt
from ostinato.release.monitors.proxy_gap import gold_people
from ostinato.reward import backtest
from ostinato.reward.config import RewardConfig
from ostinato.reward.runners import asker_of

BARS, WIDTH = 12, 32
_OTHER_COLUMNS = 34  # columns that a histogram needs besides its two bars
LONGEST_TEXT = 200


async def try_reward(
    config: Config,
    function: str,
    options: Sequence[str],
    *,
    since: float | None,
    limit: int,
    examples: int,
    text: bool,
    machine: bool,
    console: Console,
) -> None:
    """Run a reward function over the newest turns of a run's log and compare it with the rewards in use. The log is only read.

    `function`: "module:function", or "" for the one in use. `options`: ``name=value``; they override `reward.options` if the function is
    the one in use. `since`: only turns of the last so many seconds; None: all. `limit`: number of turns; 0: all. `text`: show readable
    answers. `machine`: print JSON.

    Raises NotFound if there is no run or no turn in it, BadConfig if the function cannot be loaded or an option is wrong.
    """
    existing_home(config)
    tried = _settings_to_try(config.reward, function, options)
    now = wall_clock()
    with open_log(config) as log:
        past = await backtest.past_turns(
            log,
            config.reward,
            since=-math.inf if since is None else now - since,
            limit=limit,
            gold=gold_people(config.release.monitors),
            arms=taught_by(config).arms,
        )
        if not past:
            raise NotFound(_nothing(config, since))
        old = {each.id: each.recorded for each in past if each.recorded is not None}
        with counting_bar(disable=machine) as bar:
            new = await _backtested(log, past, tried, now, bar, f"{tried.function}, tried")
            unrecorded = [each for each in past if each.id not in old]
            old |= await _backtested(log, unrecorded, config.reward, now, bar, f"{config.reward.function}, in use")
        found = backtest.compare(
            past, (config.reward.function, old), (tried.function, new), examples=examples, name_of=_names(config, past)
        )
        shown = await _texts(log, found) if text else {}
    if machine:
        console.out(json.dumps(_plain_numbers({**asdict(found), "texts": shown}), allow_nan=False), highlight=False)
    else:
        _print(found, shown, len(past) - len(unrecorded), console)


def _settings_to_try(reward: RewardConfig, function: str, options: Sequence[str]) -> RewardConfig:
    """Return the reward settings with the function and options to try. Raises BadConfig."""
    given = dict(reward.options) if function in ("", reward.function) else {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.strip().isidentifier():
            raise BadConfig(f"--option {option!r}: write it as name=value, as in --option window=600")
        given[name.strip()] = parse_override(f"option={value}")[1]
    return RewardConfig.model_validate(
        {**reward.model_dump(), "function": function or reward.function, "options": given}
    )


def _nothing(config: Config, since: float | None) -> str:
    nothing = f"the log of {config.run.directory} has no turn of people"
    if since is None:
        return f"{nothing}; ask people first, or name another run with --set run.directory=..."
    return f"{nothing} that ended in the last {ago(since)}; raise --since"


async def _backtested(
    log: Log, past: Sequence[backtest.PastTurn], reward: RewardConfig, now: float, bar: Progress, what: str
) -> dict[str, backtest.RewardOutcome]:
    if not past:
        return {}
    asker = asker_of(reward)
    line = bar.add_task(plain(what), total=len(past))
    try:
        return await backtest.backtest(log, past, asker, reward, now, lambda turns: bar.advance(line, turns))
    finally:
        await asker.close()


def _names(config: Config, past: Sequence[backtest.PastTurn]) -> Callable[[backtest.PastTurn], str]:
    """Return the function that names a turn's user: by a hash if the log is encrypted or the user was forgotten."""
    forgotten = {(each.tenant, each.user) for each in past if each.redacted}
    several = len({each.tenant for each in past}) > 1

    def name(turn: backtest.PastTurn) -> str:
        user = turn.user
        if config.record.encrypt is not Encrypt.NONE or (turn.tenant, user) in forgotten:
            user = "user " + hashlib.sha256(f"{turn.tenant}\0{user}".encode()).hexdigest()[:12]
        return f"{turn.tenant}/{user}" if several else user

    return name


async def _texts(log: Log, found: backtest.RewardComparison) -> dict[str, str]:
    """Return the example turns' answers that are still readable, by turn."""
    turns = await log.find(Turn, [(each.turn,) for each in found.examples])
    return {turn.id: " ".join(turn.text.split())[:LONGEST_TEXT] for turn in turns if not turn.redacted}


def _plain_numbers(value: Any) -> Any:
    """Return the value in JSON types, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): _plain_numbers(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_plain_numbers(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- the screen


def _print(found: backtest.RewardComparison, texts: Mapping[str, str], recorded: int, console: Console) -> None:
    console.print(f"{found.turns} turns of people, {found.may_teach} of which may be learned from; nothing was written")
    console.print(f"in use: {recorded} rewards and reasons as recorded, {found.turns - recorded} asked for now\n")
    console.print(_sides(found))
    for side in (found.new, found.old):
        _print_failures(side, console)
    width = min(WIDTH, max(4, (console.width - _OTHER_COLUMNS) // 2))
    console.print("", _histogram(found.old.values, found.new.values, width), "", sep="\n")
    console.print(f"on the {found.change.turns} turns that both reward: {_in_words(found.change, '+')} in the mean")
    told = f"{found.flipped} change sign, {found.gained} gain a reward, {found.lost} lose theirs"
    if not math.isnan(found.correlation):
        told += f"; correlation {found.correlation:.2f} (at 1.00 both teach the same)"
    console.print(told, highlight=False)
    if found.new.learnable and found.new.spread == 0.0:
        why = "all rewards that may be learned from are equal: no step learns anything from them (no_signal)"
        say(console, why, "yellow")
    _print_changes("tenant", found.tenants if len(found.tenants) > 1 else (), console)
    _print_changes("user", found.users, console)
    if found.examples:
        console.print(Text("\nlargest changes", "dim"))
    for each in found.examples:
        said = ", ".join(map(plain, each.signals)) or "no signals"
        change = f"{each.old:+.3f} -> {each.new:+.3f}"
        say(console, f"{plain(each.turn)}  {plain(each.who)}  {change}  {said}")
        if each.turn in texts:
            say(console, f"  {plain(texts[each.turn])}", "dim")


def _print_failures(side: backtest.RewardSide, console: Console) -> None:
    for each in side.failed:
        say(console, plain(f"{side.function} failed on {each.turns}, e.g. {each.example}: {each.reason}"), "red")
    if left_out := side.without.get(backtest.GIVEN_UP, 0):
        lost = f"it had cost {backtest.MOST_LOST} processes, or would not load"
        why = f"{side.function} was not asked about {left_out} turns any more: {lost}"
        say(console, plain(why), "red")


def _print_changes(title: str, rows: Sequence[backtest.ChangeFor], console: Console) -> None:
    if not rows:
        return
    names = (f"{title}s with the largest change in all", "turns", "change in the mean")
    table = bare_table(*names, right=(1, 2))
    for row in rows:
        table.add_row(Text(plain(row.who)), str(row.turns), f"{row.change:+.3f}")
    console.print("", table, sep="\n")


def _sides(found: backtest.RewardComparison) -> Table:
    table = bare_table()
    for name in ("", "in use", "tried"):
        table.add_column(name, overflow="fold")
    sides = (found.old, found.new)
    reasons = dict.fromkeys([*found.old.without, *found.new.without])

    def learnable(side: backtest.RewardSide) -> str:
        return f"{side.learnable} ({_percent(side.learnable, found.may_teach)} of those that may)"

    rows = [
        ("function", [plain(side.function) for side in sides]),
        ("rewarded", [str(side.mean.turns) for side in sides]),
        *((plain(reason), [str(side.without.get(reason, 0)) for side in sides]) for reason in reasons),
        ("mean, 95% by person", [_in_words(side.mean) for side in sides]),
        ("may be learned from", [learnable(side) for side in sides]),
        ("their spread", [f"{side.spread:.3f}" for side in sides]),
    ]
    for name, cells in rows:
        table.add_row(Text(name), *map(Text, cells))
    return table


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _in_words(mean: backtest.MeanOfRewards, sign: str = "") -> str:
    if not mean.turns:
        return "-"
    if math.isnan(mean.lower):
        return f"{mean.mean:{sign}.3f} (one person: no interval)"
    return f"{mean.mean:{sign}.3f} [{mean.lower:{sign}.3f}, {mean.upper:{sign}.3f}]"


def _histogram(old: Sequence[float], new: Sequence[float], width: int) -> Table:
    """Return both functions' rewards as bars of at most `width` columns, by value if there are few, otherwise by equal intervals."""
    table = bare_table("reward", "in use", "", "tried", "", right=(0,))
    distinct = np.unique(np.round([*old, *new], 9))
    if len(distinct) <= BARS:
        names = [f"{value:g}" for value in distinct]
        edges = np.append(distinct - 1e-6, np.inf)
    else:
        edges = np.linspace(distinct[0] - 1e-9, distinct[-1] + 1e-9, BARS + 1)
        names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
    if not names:
        return table
    counts = [np.histogram(side, edges)[0] for side in (old, new)]
    most = max(int(count.max()) for count in counts) or 1
    for name, *both in zip(names, *counts, strict=True):
        table.add_row(name, *(cell for count in both for cell in (str(count), "█" * math.ceil(width * count / most))))
    return table
