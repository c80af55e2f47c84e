"""`python -m ostinato.cli`."""

from ostinato.cli import main

main()
