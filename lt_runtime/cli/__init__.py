"""The command line: `python -m lt_runtime cache|check|compare|demo|doctor|profile|warmup`.

Whatever goes wrong, a user gets a line and an exit status, and no traceback. `python -X dev -m lt_runtime` shows the
traceback of an exception that nobody has foreseen.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

# Functions import all else. Importing takes most of the time, and `main` must be there to meet an interrupt.
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

INTERRUPTED: Final = 130
CLOSED_PIPE: Final = 141
"""Exit statuses, as a shell reports SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 if something is not as it should be, or one of those above.

    Raises:
        SystemExit: the arguments are not accepted (2), or help was asked for (0).
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = " ".join(["lt_runtime", *arguments[:1]])
    try:
        try:
            return _run(name, arguments)
        finally:
            _flush()
    except KeyboardInterrupt:
        _end_at_once_if_interrupted_again()
        return _tell(name, "interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader has seen enough
        return CLOSED_PIPE
    except Exception as error:
        return _tell(name, _in_words(error), 1)


def _run(name: str, arguments: list[str]) -> int:
    from lt_runtime.cli.output import print_anything, warnings_on_one_line

    print_anything()
    with warnings_on_one_line(name):
        parsed, command = _read(name, arguments)
        return int(command.run(parsed))


def _read(name: str, arguments: list[str]) -> tuple[Namespace, Any]:
    """The arguments, and the module of their command. No module of another command is imported.

    Meanwhile an interrupt ends the process at once: compiled modules that import others print its traceback, and turn
    it into an ImportError.
    """
    import importlib
    import os
    import signal

    def end(*_: object) -> None:
        os._exit(_tell(name, "interrupted", INTERRUPTED))

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a process in the background may have to ignore it
        signal.signal(signal.SIGINT, end)
    try:
        from lt_runtime.cli.arguments import parser

        parsed = parser(arguments[0] if arguments else None).parse_args(arguments)
        return parsed, importlib.import_module(f"lt_runtime.cli.{parsed.command}")
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _flush() -> None:
    """Writes what is printed, because an error would become a traceback at the end of the process."""
    if sys.stdout is None:  # it was closed when the process began
        return
    try:
        sys.stdout.flush()
    except OSError:
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left can go nowhere else
        raise


def _end_at_once_if_interrupted_again() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _tell(name: str, complaint: str, status: int) -> int:
    print(f"{name}: {complaint}", file=sys.stderr, flush=True)
    return status


def _in_words(error: Exception) -> str:
    from lt_runtime.errors import LtError

    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, LtError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}; `python -m lt_runtime doctor` says what is missing"
    if sys.flags.dev_mode:
        raise error
    return f"{type(error).__name__}: {error}; this is a fault of lt_runtime, which `python -X dev -m lt_runtime` traces"
