"""Observations for the fidelity probe: machines drawn from one distribution, and machines with a telltale feature."""

import numpy as np

from ostinato.worlds.fidelity.observation import Observation


def observed(seed, side, groups, each=1, *, tell=0.0, shift=0.0, spread=1.0, numbers=12, tools=8):
    """`groups` machines of one side, each observed `each` times. `tell` is the share of observations with a variable that gives it away;
    `shift` moves one number, and `spread` widens another.
    """
    rng = np.random.default_rng([seed, ord(side)])
    found = []
    for group in range(groups):
        own = 0.7 * rng.normal(size=numbers)
        zone = str(rng.choice(["UTC", "CET", "PST"]))
        installed = rng.random(tools) < 0.6
        for _ in range(each):
            features = {f"n{at}": float(own[at] + rng.normal()) for at in range(numbers)}
            features["n0"] += shift
            features["n1"] *= spread
            features |= {f"tool:{at}": float(there) for at, there in enumerate(installed)}
            features |= {"zone": zone, "host": f"{side}{group}-{rng.integers(9)}"}
            if rng.random() < tell:
                features["env:IS_SANDBOX"] = 1.0
            found.append(Observation(group=f"{side}{group}", features=features))
    return found


def episodes(seed, side, groups, each=3, *, prompts=40, popular=0.0, tell=0.0, own=0.5):
    """Episodes whose features mostly follow from the prompt. Production's groups are people with several prompts each, simulation's are the
    rollouts of one prompt. `popular`: how much likelier low prompts are; `own`: the size of a group's own effect; `tell`: as above.
    """
    rng = np.random.default_rng([seed, ord(side), 7])
    chances = np.exp(-popular * np.arange(prompts) / prompts)
    found = []
    for group in range(groups):
        mine, same = own * rng.normal(size=2), int(rng.choice(prompts, p=chances / chances.sum()))
        for _ in range(each):
            prompt = same if side == "s" else int(rng.choice(prompts, p=chances / chances.sum()))
            features = {
                "assistant.chars": float(prompt),
                "prompt.tokens": float((prompt * 17) % 23),
                "seconds": float(prompt / prompts + mine[0] + rng.normal()),
                "answer.tokens": float((prompt % 5) + mine[1] + rng.normal()),
                "person": f"{side}{group}",
            }
            if rng.random() < tell:
                features["system.word:simulated"] = 1.0
            found.append(Observation(group=f"{side}{group}", features=features, asked=f"q{prompt}"))
    return found
