"""Caps on the share of a batch that one person, or one tenant, may have. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.core.records import Person

FAIR_SHARES = 2.0
ROUNDING = 1e-12


def capped(masses: Mapping[Person, float], *, user_cap: float, tenant_cap: float) -> dict[Person, float]:
    """For each person with any mass, the factor in (0, 1] that keeps all shares of the sum within the caps.

    A person keeps at most the share max(user_cap, 2 / persons): the cap in a batch of many, twice an equal share in a small one,
    no cap for one or two. A tenant keeps at most max(tenant_cap, 2 / tenants), or more where the others' persons, each at its own
    cap, could not fill the rest. A person or tenant over the cap is scaled down as a whole, and nobody is scaled up: of all such
    solutions this is the one that takes least away.

    Both caps are shares of what is left after capping, M: M is the largest solution of M = f(M), where f(M) is the sum of the
    masses cut at user_share * M and then, per tenant, at tenant_share * M. f is concave and piecewise linear, so that Newton's
    method from above reaches M exactly.

    Example: ``capped({("t", "a"): 7.0, ("t", "b"): 1.0, ("t", "c"): 1.0, ("t", "d"): 1.0}, user_cap=0.1, tenant_cap=0.5)`` brings
    a down to 3.0, half of the new sum.
    """
    tenants: dict[str, list[float]] = {}
    for (tenant, _), mass in masses.items():
        if mass > 0.0:
            tenants.setdefault(tenant, []).append(mass)
    if not tenants:
        return {}
    user_share = min(1.0, max(user_cap, FAIR_SHARES / sum(map(len, tenants.values()))))
    tenant_share = max(tenant_cap, FAIR_SHARES / len(tenants), _least_tenant_share(tenants, user_share))
    level = _level(tenants, user_share, tenant_share)
    user_most, tenant_most = user_share * level, tenant_share * level
    kept = {tenant: sum(min(mass, user_most) for mass in theirs) for tenant, theirs in tenants.items()}
    return {
        person: _factor(user_most, mass) * _factor(tenant_most, kept[person[0]])
        for person, mass in masses.items()
        if mass > 0.0
    }


def _factor(most: float, mass: float) -> float:
    return 1.0 if mass <= most else most / mass


def _least_tenant_share(tenants: Mapping[str, list[float]], user_share: float) -> float:
    """The smallest cap on tenants under which tenants with so few users can still fill a batch."""
    rest = 1.0
    smallest_first = sorted(user_share * len(theirs) for theirs in tenants.values())
    for index, most in enumerate(smallest_first):
        equal = rest / (len(smallest_first) - index)
        if most >= equal:
            return equal * (1.0 + ROUNDING)
        rest -= most
    return 1.0


def _level(tenants: Mapping[str, list[float]], user_share: float, tenant_share: float) -> float:
    """The largest M with f(M) = M. See `capped`."""
    level = sum(sum(theirs) for theirs in tenants.values())
    while True:
        fixed, slope = 0.0, 0.0  # f(M) = fixed + slope * M near the present M
        for theirs in tenants.values():
            below = sum(mass for mass in theirs if mass <= user_share * level)
            over = user_share * sum(mass > user_share * level for mass in theirs)
            if below + over * level > tenant_share * level:
                slope += tenant_share
            else:
                fixed, slope = fixed + below, slope + over
        if fixed + slope * level >= level * (1.0 - ROUNDING):
            return level
        level = fixed / (1.0 - slope)
