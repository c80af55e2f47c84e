"""Entry point of the helper, run as root: `python3 helper.pyz DIRECTORY`. Unpacks the host's uploads in DIRECTORY and serves requests."""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - the template's interpreter, not ours
    print("!the sandbox's python3 is %d.%d, and 3.10 is needed" % sys.version_info[:2], flush=True)  # noqa: T201, UP031
    sys.exit(3)

from relay import main

main(sys.argv[1])
