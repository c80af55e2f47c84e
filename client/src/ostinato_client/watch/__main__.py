"""`python -m ostinato_client.watch`: the watcher without the main package."""

from __future__ import annotations

import sys

from ostinato_client.watch.running import main

sys.exit(main(sys.argv[1:]))
