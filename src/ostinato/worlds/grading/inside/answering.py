"""Inside a sandbox: draws inputs, calls a function on inputs, or checks relations. Reads one job from stdin and writes lines of JSON.

A job names the function by `module` and `name`, or by `source` and `name`. Its inputs are either in `inputs`, trees of argument tuples, or
drawn: `draw` is source text that defines ``draw(random)``, with `seed` and `count`; the optional `vary` defines ``vary(random, args)``,
which derives further inputs from one. Output lines are ``[input, outcome, input after the call]``, where the outcome is
``["returned", tree]``, ``["raised", names of the error's classes]`` or ``["opaque", why]``, or null if there is no function.

A checking job has `holds`, source text that defines ``holds(inputs, results) -> bool``, and `groups`, lists of ``[input, result]`` as
trees. Output lines are true or false, one per group.
"""

import importlib
import json
import os
import random
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.worlds.grading.inside.encoding import Opaque, decode, encode


def outcome(function: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Call the function, and return the outcome."""
    try:
        result = function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever the function raises is its outcome
        return ["raised", [kind.__name__ for kind in type(error).__mro__]]
    try:
        return ["returned", encode(result)]
    except Opaque as opaque:
        return ["opaque", str(opaque)]


def function_of(job: dict[str, Any]) -> Any:
    """Return the function that the job names."""
    if "source" in job:
        space: dict[str, Any] = {"__name__": "reference"}
        exec(compile(job["source"], "<reference>", "exec"), space)
        return space[job["name"]]
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(job["module"]), job["name"])


def inputs_of(job: dict[str, Any]) -> list[Any]:
    """Return trees of argument tuples, given or drawn. With `vary`, each drawn input is followed by its variations."""
    if "inputs" in job:
        return job["inputs"]
    space: dict[str, Any] = {"__name__": "drawing"}
    exec(compile(job["draw"], "<draw>", "exec"), space)
    if job.get("vary"):
        exec(compile(job["vary"], "<vary>", "exec"), space)
    drawn = random.Random(job["seed"])
    trees: list[Any] = []
    for _ in range(job["count"]):
        arguments = tuple(space["draw"](drawn))
        trees.append(encode(arguments))
        if job.get("vary"):
            trees.extend(encode(tuple(each)) for each in space["vary"](drawn, decode(trees[-1])))
    return trees


def check(job: dict[str, Any]) -> None:
    """Write whether the relation holds for each group."""
    space: dict[str, Any] = {"__name__": "checking"}
    exec(compile(job["holds"], "<holds>", "exec"), space)
    for group in job["groups"]:
        try:
            held = bool(space["holds"]([decode(pair[0]) for pair in group], [decode(pair[1]) for pair in group]))
        except Exception:  # noqa: BLE001 - the relation cannot be applied to this kind of answer
            held = False
        sys.stdout.write(f"{json.dumps(held)}\n")


def main() -> None:
    """Run one job."""
    job = json.loads(sys.stdin.buffer.read())
    if "holds" in job:
        check(job)
        return
    channel = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    inputs = inputs_of(job)
    function = function_of(job) if job.get("name") else None
    for tree in inputs:
        arguments = decode(tree)
        answer = outcome(function, arguments) if function else None
        try:
            after = encode(arguments)
        except Opaque:
            after = None
        line = json.dumps([tree, answer, after]).encode() + b"\n"
        while line:
            line = line[os.write(channel, line) :]
    os._exit(0)


if __name__ == "__main__":
    main()
