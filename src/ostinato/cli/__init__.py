"""The command line: `ostinato COMMAND --help` explains each."""


def main() -> None:
    """Run the command line. Ctrl-C ends every command that has no orderly end of its own with one line and the exit code 130, from its
    first import on.
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
    """True if Ctrl-C raised it, or came before it: a library that is interrupted while it loads raises errors of its own."""
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
