"""`python -m ostinato_client.connect`: the command `ostinato-connect` where no script of it is installed."""

from __future__ import annotations

import sys

from ostinato_client.connect.command import main

sys.exit(main(sys.argv[1:], "python -m ostinato_client.connect"))
