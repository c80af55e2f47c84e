"""Inside a sandbox: checks whether a function's answers satisfy a relation. Reads a job from stdin and writes lines of JSON.

A job has `holds`, source text that defines ``holds(inputs, results) -> bool``, and `groups`: lists of ``[input, result]`` as trees.
"""

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.worlds.grading.inside.encoding import decode


def main() -> None:
    """Answer one job: true or false for each group."""
    job = json.loads(sys.stdin.buffer.read())
    space: dict[str, Any] = {"__name__": "relating"}
    exec(compile(job["holds"], "<holds>", "exec"), space)
    for group in job["groups"]:
        try:
            held = bool(space["holds"]([decode(pair[0]) for pair in group], [decode(pair[1]) for pair in group]))
        except Exception:  # noqa: BLE001 - the relation cannot be applied to this kind of answer
            held = False
        sys.stdout.write(f"{json.dumps(held)}\n")


if __name__ == "__main__":
    main()
