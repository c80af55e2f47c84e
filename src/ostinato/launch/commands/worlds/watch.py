"""`ostinato worlds watch`: a run's rollouts as they happen, or one of them step by step. The page *Worlds* shows the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ostinato.app.storage import home, model_path, open_log
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.durations import ago
from ostinato.core.errors import NotFound
from ostinato.launch.views.screen import bare_table, plain, plain_lines
from ostinato.status.worlds.run_worlds import RolloutDetail, RolloutQuery, RunWorlds, WorldsNow
from ostinato.status.worlds.tasks import SolvedShare
from ostinato.status.worlds.transcript import RolloutStep
from ostinato.status.worlds.underway import GroupUnderWay, RolloutLine

_LOOK_S = 1.0
_GROUPS, _NEWEST, _FAMILIES = 8, 12, 15
_STYLES = {"solved": "green", "cheated": "bold red", "failed": "yellow"}


async def watch_worlds(config: Config, console: Console, *, once: bool) -> None:
    """Show the rollouts until Ctrl-C, or once. Without a terminal, print a line for each rollout that ends."""
    async with _facts(config) as facts:
        if once:
            console.print(screen(await facts.worlds(""), wall_clock()))
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False, screen=False) as live:
                while True:
                    live.update(screen(await facts.worlds(""), wall_clock()), refresh=True)
                    await asyncio.sleep(_LOOK_S)
        else:
            seen = -1
            while True:
                seen = await print_ended(facts, seen, console)
                await asyncio.sleep(_LOOK_S)


async def show_rollout(config: Config, console: Console, *, task: str, episode: str) -> None:
    """Print one rollout (of `episode`, or the newest of `task`) step by step. Raises NotFound."""
    async with _facts(config, words=True) as facts:
        await print_rollout(facts, console, task=task, episode=episode)


async def print_ended(facts: RunWorlds, seen: int, console: Console) -> int:
    """Print a line for each rollout numbered above `seen`, of the newest page of rollouts. Return the highest number."""
    listed = (await facts.rollouts(RolloutQuery())).rows
    for line in reversed([each for each in listed if each.seq > seen]):
        console.print(line_about(line), soft_wrap=True)
    return max([seen, *(each.seq for each in listed)])


async def print_rollout(facts: RunWorlds, console: Console, *, task: str = "", episode: str = "") -> None:
    """Print the steps, changes and grading of one rollout, or of the newest of a task. Raises NotFound."""
    if not episode:
        rows = (await facts.rollouts(RolloutQuery(task=task))).rows
        if not rows:
            raise NotFound(
                f"no finished rollout of task {task!r} is on record; `ostinato worlds watch` shows which tasks have some",
                field="task",
            )
        episode = rows[0].episode
    whole = detail = await facts.rollout(episode, 0)
    if whole is None:
        raise NotFound(f"there is no rollout {episode!r}; `ostinato worlds watch` lists them", field="rollout")
    console.print(head_of(whole), soft_wrap=True)
    shown = 0
    while detail is not None and detail.steps:
        for step in detail.steps:
            console.print(step_of(step), soft_wrap=True)
        shown += len(detail.steps)
        detail = await facts.rollout(episode, shown) if shown < detail.turns else None
    console.print(outcome_of(whole), soft_wrap=True)


@contextlib.asynccontextmanager
async def _facts(config: Config, *, words: bool = False) -> AsyncGenerator[RunWorlds]:
    """Open a run's facts about worlds. `words`: also decode tokens, which needs the model's tokenizer."""
    pieces, readers = _no_words, None
    if words:
        from ostinato.model.renderer import HFRenderer

        renderer = await asyncio.to_thread(lambda: HFRenderer(model_path(config)))
        pieces, readers = renderer.token_bytes, renderer.reader
    with (
        open_log(config) as log,
        contextlib.closing(RunWorlds(home(config), config, log, pieces, readers)) as facts,
    ):
        yield facts


def _no_words(_: int) -> bytes:
    return b""


# ------------------------------------------------------------ the overview


def screen(now: WorldsNow, at: float) -> RenderableType:
    """Return the overview: tasksets, groups in progress, success by family, the newest rollouts, cheats."""
    pacing, groups = now.pacing, now.counts.groups
    parts: list[RenderableType] = []
    for each in now.tasksets:
        name = plain(each.name) or "earlier"
        parts.append(Text(f"taskset {name} {plain(each.hash[:12])}: {each.rollouts} rollouts on record", "bold"))
    if not parts:
        parts.append(Text("no rollout has ended yet", "dim"))
    way = f"{pacing.open - pacing.told} under way, {pacing.told} wait for the trainer, {pacing.spent} taken"
    parts.append(Text(f"groups: {pacing.drawn} drawn, {way}; without contrast {groups.flat} of {groups.graded}"))
    if now.families:
        parts.append(_families(now))
    parts += [_group(group) for group in now.under_way[:_GROUPS]]
    if now.newest:
        parts.append(Text("newest", "dim"))
    parts += [
        Text.assemble(f"  {'' if line.at is None else f'{ago(at - line.at)} ago':>14}  ", line_about(line))
        for line in now.newest[:_NEWEST]
    ]
    parts += [
        Text(f"cheated {count} times: {plain(what)} ({plain(episode)})", "bold red")
        for what, count, episode in now.counts.cheats
    ]
    return Group(*parts)


def line_about(line: RolloutLine) -> Text:
    """Return one line about a rollout."""
    how = _outcome(line)
    value = "not graded" if line.value is None else f"{line.value:g}"
    versions = "" if line.policy is None else f"  v{line.policy.number}"
    if line.policy is not None and line.policy_last not in (None, line.policy):
        versions += f" to v{line.policy_last.number}" if line.policy_last else ""
    return Text.assemble(
        (f"{plain(line.episode)}  {plain(line.task)}  {line.split}  ", ""),
        (f"{value} ({plain(line.ended)}{', cheated' if line.cheated else ''})", _STYLES.get(how, "")),
        (versions, "dim"),
    )


def _outcome(line: RolloutLine) -> str:
    if line.cheated:
        return "cheated"
    return "solved" if line.solved else "" if line.value is None else "failed"


def _families(now: WorldsNow) -> Table:
    table = bare_table("family", "split", "tasks", "rollouts", "solved", f"by v{now.families[0].version}")
    for each in now.families[:_FAMILIES]:
        table.add_row(
            Text(plain(each.family)),
            Text(plain(each.split)),
            "" if each.tasks is None else str(each.tasks),
            "0" if each.solved is None else str(each.solved.rollouts),
            _share(each.solved),
            _share(each.newest),
        )
    return table


def _share(share: SolvedShare | None) -> str:
    return "" if share is None else f"{100 * share.share:.0f}% [{100 * share.lower:.0f}, {100 * share.upper:.0f}]"


def _group(group: GroupUnderWay) -> Text:
    """Return one line about a group, with a mark per member: + solved, - failed, ! cheated, ? not graded, . in progress."""
    marks = {"cheated": "!", "solved": "+", "failed": "-"}
    over = [None if each.ended in ("waiting", "under way") else _outcome(each) for each in group.members]
    drawn = "".join("." if how is None else marks.get(how, "?") for how in over)
    waits = "  waits for the trainer" if group.told else ""
    return Text.assemble((f"  {plain(group.name)}  {plain(group.task)}  ", ""), (drawn, "bold"), (waits, "dim"))


# ------------------------------------------------------------ one rollout


def head_of(detail: RolloutDetail) -> RenderableType:
    """Return the heading of a rollout, with the members of its group."""
    line = detail.line
    told = [Text.assemble(("rollout ", "bold"), line_about(line)), Text(f"harness {plain(line.harness)}", "dim")]
    if len(detail.members) > 1:
        told.append(Text("its group:", "dim"))
        told += [Text.assemble("  ", line_about(each)) for each in detail.members]
    return Group(*told)


def step_of(step: RolloutStep) -> RenderableType:
    """Return one step: the new part of the prompt, and the model's answer."""
    made = ", ".join(f"v{policy.number}" for policy in step.versions)
    head = f"--- turn {step.at + 1}  {plain(step.turn)}  {made}  {step.new} new of {step.prompt} tokens, {step.sampled} sampled"
    parts: list[RenderableType] = [Text(f"{head}  {step.finish}  {step.seconds:.1f} s", "bold")]
    if step.missing or step.redacted:
        parts.append(Text("no longer in the log" if step.missing else "its text was erased", "yellow"))
    parts += [
        Text.assemble((f"{plain(said.role) or 'given'}: ", "cyan"), plain_lines(said.text)) for said in step.given
    ]
    if step.reasoning is not None:
        parts.append(Text.assemble(("reasoning: ", "dim"), (plain_lines(step.reasoning.text), "dim")))
    if step.answer is not None:
        parts.append(Text.assemble(("answer: ", "green"), plain_lines(step.answer.text)))
    parts += [Text(f"call {plain(call.name)} {plain_lines(call.arguments)}", "magenta") for call in step.calls]
    return Group(*parts)


def outcome_of(detail: RolloutDetail) -> RenderableType:
    """Return the files that a rollout changed, and its grading."""
    parts: list[RenderableType] = []
    for change in detail.changes:
        parts.append(Text(f"--- {plain(change.kind)} {plain(change.path)}", "bold"))
        parts += [_diff_line(line) for line in (change.diff or "(no text)").splitlines()]
    if detail.more_changes:
        parts.append(Text(f"and {detail.more_changes} more", "dim"))
    if not detail.on_record:
        return Group(*parts, Text("it has not ended, or is no longer on record", "dim"))
    parts.append(Text.assemble(("graded ", "bold"), line_about(detail.line)))
    parts += [Text(f"  {plain(name)} {value:g}") for name, value in detail.parts.items()]
    parts += [Text(f"  {plain(line)}") for line in detail.why.splitlines()]
    parts += [Text(f"  cheated: {plain(what)}", "bold red") for what in detail.line.cheated]
    if detail.effort:
        effort = ", ".join(f"{plain(name)} {value:g}" for name, value in detail.effort.items())
        parts.append(Text(f"effort: {effort}", "dim"))
    return Group(*parts)


def _diff_line(line: str) -> Text:
    return Text(plain(line), {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], ""))
