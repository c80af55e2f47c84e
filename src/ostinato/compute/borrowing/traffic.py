"""Traffic for simulations: synthetic from stated parameters, or read from a user's trace. Pure."""

from __future__ import annotations

import csv
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest
from ostinato.core.lines import lines_of

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """Synthetic traffic: a daily wave with weekends, noise and bursts.

    The wave lies between `night` and 1 times `peak` requests a second, on weekends `weekend` times that. The rate wanders (log-normal,
    `noise`, over minutes). There are `bursts` bursts a day, log-uniform between 1.1 and `burst` times the rate, which rise within `rise_s`
    and fade over `fade_s`.

    Example: ``traffic_of(Diurnal(days=2), step_s=20.0, seed=0)``
    """

    days: int = 14
    peak: float = 100.0
    night: float = 0.15
    weekend: float = 0.6
    noise: float = 0.05
    bursts: float = 3.0
    burst: float = 1.5
    rise_s: float = 120.0
    fade_s: float = 900.0


def traffic_of(made: Diurnal, step_s: float, seed: int) -> NDArray[np.float64]:
    """Requests a second, one value for each step [T]. The same seed gives the same traffic."""
    rng = np.random.default_rng(seed)
    time_T = np.arange(round(made.days * DAY_S / step_s)) * step_s
    wave_T = 0.5 - 0.5 * np.cos(2 * np.pi * (time_T / DAY_S - 2 / 24))  # the minimum is at 2 a.m.
    rate_T = made.peak * (made.night + (1 - made.night) * wave_T)
    rate_T *= np.where((time_T // DAY_S) % 7 >= 5, made.weekend, 1.0)
    minutes = rng.normal(size=len(time_T))
    keep = np.exp(-step_s / 300.0)
    wander_T, last = np.empty(len(time_T)), 0.0
    for at, shock in enumerate(minutes.tolist()):
        last = keep * last + np.sqrt(1 - keep**2) * shock
        wander_T[at] = last
    rate_T *= np.exp(made.noise * wander_T)
    for start in np.sort(rng.random(rng.poisson(made.bursts * made.days))) * made.days * DAY_S:
        height = np.exp(rng.uniform(np.log(1.1), np.log(made.burst))) - 1
        since_T = time_T - start
        shape_T = np.clip(since_T / made.rise_s, 0, 1) * np.exp(-np.clip(since_T - made.rise_s, 0, None) / made.fade_s)
        rate_T *= 1 + height * shape_T
    return rate_T


def read_traffic(text: str, step_s: float) -> NDArray[np.float64]:
    r"""Read a trace from CSV with the header `seconds,requests_per_second`. Each rate holds until the next line's time, the last rate for
    as long as the one before.

    Raises BadRequest, which names the line, for a value that is not a number, a time that does not increase, or a negative rate.

    Example: ``read_traffic("seconds,requests_per_second\n0,5\n60,7\n", 20.0)`` has three times 5 and three times 7
    """
    rows = list(csv.reader(lines_of(text)))
    if not rows or [name.strip() for name in rows[0]] != ["seconds", "requests_per_second"]:
        raise BadRequest("line 1: the header is to be seconds,requests_per_second", field="seconds")
    times: list[float] = []
    rates: list[float] = []
    for number, row in enumerate(rows[1:], 2):
        try:
            time, rate = (float(value) for value in row)
        except ValueError:
            raise BadRequest(f"line {number}: two numbers are wanted, not {','.join(row)!r}", field="seconds") from None
        if not 0 <= rate < 1e12:
            raise BadRequest(f"line {number}: {rate} is no rate", field="requests_per_second")
        if not (times[-1] if times else -1e12) < time < 1e12:
            raise BadRequest(
                f"line {number}: {time} does not come after {times[-1] if times else 'any'}", field="seconds"
            )
        times.append(time)
        rates.append(rate)
    if len(times) < 2:
        raise BadRequest("a trace has at least two lines", field="seconds")
    time_T = np.arange(times[0], 2 * times[-1] - times[-2], step_s)
    return np.array(rates)[np.searchsorted(times, time_T, side="right") - 1]
