"""`ostinato auto`: Auto's arms (a bandit), a test of its logged propensities, and off-policy estimates of other shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ostinato.app.storage import existing_home, open_folds, open_log
from ostinato.config import Config
from ostinato.core.arm_assignment import Dealing
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.launch.views.screen import bare_table
from ostinato.release.auto.estimating import Prospect, prospect
from ostinato.release.auto.offpolicy import PolicyValue
from ostinato.release.auto.router import FoldedRouter, Router
from ostinato.release.ledger import ReleaseLedger
from ostinato.serve.config import AutoArm


def parse_shares(texts: tuple[str, ...]) -> dict[str, float]:
    """Parse ``("live=0.7", "large=0.3")`` into {"live": 0.7, "large": 0.3}. Raises BadConfig."""
    shares: dict[str, float] = {}
    for text in texts:
        arm, _, share = text.partition("=")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadConfig(f"--share {text!r}: write it as arm=0.7")
        if arm in shares:
            raise BadConfig(f"--share {text!r}: the arm {arm!r} has a share already")
        shares[arm] = value
    return shares


async def show_auto(config: Config, shares: tuple[str, ...], console: Console) -> None:
    """Print the arms, the test of the propensities and, if `shares` are given, their off-policy estimate.

    Raises NotFound if the run does not exist or has too few turns for an estimate; BadConfig.
    """
    existing_home(config)
    arms = [arm.name for arm in config.serve.auto.arms]
    if not arms:
        raise BadConfig(
            'serve.auto.arms is empty: there is no Auto; name its arms, e.g. [{ name = "live", slot = "live" }]'
        )
    wanted = parse_shares(shares)
    with open_log(config) as log:
        episodes = config.serve.auto.episodes
        folded = FoldedRouter(log, open_folds(config), wall_clock, arms, config.release.auto, episodes)
        await folded.catch_up(telling=False)
        dealing = (await ReleaseLedger(log, wall_clock).refresh()).dealing
        there = _arms_in_use(config.serve.auto.arms, dealing)
        console.print(_arms(folded.router, there), _propensities(folded.router, config.release.auto.alpha))
        if wanted:
            console.print(_prospect(await prospect(log, wanted, config.release.auto)))


def _arms_in_use(arms: Sequence[AutoArm], dealing: Dealing | None) -> list[str]:
    """Return the arms in use; canary and previous are in use only during a trial that needs them."""
    dealing = dealing or Dealing(salt="")
    tried = {"canary": dealing.canary > 0.0, "previous": dealing.previous > 0.0}
    return [arm.name for arm in arms if tried.get(arm.slot or "", True)]


def _arms(router: Router, there: list[str]) -> Table:
    names = ("arm", "share", "utility", "95%", "users", "turns", "failed", "cost a turn")
    table = bare_table(*names, right=range(1, len(names)))
    odds = router.odds(there)
    for view in router.views():
        known = view.utility
        low, high = known.mean - 1.96 * known.deviation, known.mean + 1.96 * known.deviation
        share = f"{odds[view.arm]:.1%}" if view.arm in odds else "not in use"
        numbers = (share, f"{known.mean:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{known.users:.0f}")
        table.add_row(view.arm, *numbers, str(view.turns), str(view.failed), f"{view.cost:.6f}")
    return table


def _propensities(router: Router, alpha: float) -> str:
    wrong = router.propensities.wrong(alpha)
    if wrong:
        return f"\nThe logged propensities of {', '.join(wrong)} do not match the draws: do not trust estimates based on them."
    draws = max((balance.draws for balance in router.propensities.balances()), default=0)
    return f"\nNo evidence against the logged propensities ({draws} draws, alpha {alpha:g}, however often you look)."


def _prospect(found: Prospect) -> Table:
    named = ", ".join(f"{arm} {share:.0%}" for arm, share in found.shares.items())
    names = ("estimate", "utility a turn", "95%", "effective turns")
    table = bare_table(*names, right=range(1, len(names)))
    table.title_justify = "left"
    table.title = f"\nWith {named}, from {found.turns} turns, {found.rated} with a reward or a failure"
    table.caption = found.advice or None
    rows = {"as logged": found.earned, "IPS": found.ips, "SNIPS": found.snips, "doubly robust": found.dr}
    for name, value in rows.items():
        table.add_row(name, *_numbers(value))
    return table


def _numbers(value: PolicyValue | None) -> tuple[str, str, str]:
    if value is None:
        return "-", "-", "-"
    return f"{value.mean:+.3f}", f"{value.lower:+.3f} to {value.upper:+.3f}", f"{value.turns:.0f}"
