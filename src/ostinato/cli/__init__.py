"""The command line: `ostinato COMMAND --help` explains each."""


def main() -> None:
    """Run the command line. From the first import on, Ctrl-C ends a command that does not handle it itself with one line and exit
    code 130.
    """
    interruption = None
    try:
        from ostinato.launch.workers.shutdown import Interruption

        interruption = Interruption()
        from ostinato.core.interpreter import collecting_rarely

        with collecting_rarely():
            from ostinato.cli.commands import run_command
        run_command()
    except BaseException as error:
        if not _by_interrupt(error):
            raise
    else:
        return
    _end(130 if interruption is None else interruption.code)


def _by_interrupt(error: BaseException) -> bool:
    """Return True if a KeyboardInterrupt caused the error: a library that is interrupted while it loads raises errors of its own."""
    seen: BaseException | None = error
    passed = set[int]()
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        passed.add(id(seen))
        seen = seen.__cause__ or seen.__context__
        if id(seen) in passed:  # `raise error from error` makes a loop
            return False
    return seen is not None and not isinstance(error, SystemExit)


def _end(code: int) -> None:
    import contextlib
    import signal
    import sys

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C, while threads end, kills without a traceback
    with contextlib.suppress(OSError):  # the terminal is gone
        sys.stderr.write("interrupted\n")
    sys.exit(code)
