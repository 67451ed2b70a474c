"""The command line: `python -m lt_runtime cache|check|compare|demo|doctor|profile|warmup`.

Every failure is one line on stderr and an exit status, without a traceback. `python -X dev -m lt_runtime` shows the
tracebacks of exceptions that are not the package's own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

# Other modules are imported in functions, because imports take most of a command's time, and `main` handles Ctrl-C
# during them.
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

INTERRUPTED: Final = 130
CLOSED_PIPE: Final = 141
"""Exit statuses that a shell reports for SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 after a failure, `INTERRUPTED` or `CLOSED_PIPE`.

    Raises:
        SystemExit: the arguments are not accepted (2), or help was asked for (0).
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = " ".join(["lt_runtime", *arguments[:1]])
    try:
        try:
            from lt_runtime.cli.output import readable_output

            with readable_output(name):
                parsed, command = _read(name, arguments)
                return int(command.run(parsed))
        finally:
            _flush()
    except KeyboardInterrupt:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # after the first Ctrl-C, a second one ends the process at once
        return _tell(name, "interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        return CLOSED_PIPE
    except Exception as error:
        return _tell(name, _in_words(error), 1)


def _read(name: str, arguments: list[str]) -> tuple[Namespace, Any]:
    """Parses the arguments and imports the module of their command, and of no other command.

    During the imports an interrupt ends the process at once. As an exception it would pass through compiled modules
    that are being imported, which print a traceback and raise ImportError instead.
    """
    import importlib
    import os
    import signal

    def end(*_: object) -> None:
        os._exit(_tell(name, "interrupted", INTERRUPTED))

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell makes background processes ignore SIGINT, which must stay so
        signal.signal(signal.SIGINT, end)
    try:
        from lt_runtime.cli.arguments import parser

        parsed = parser(arguments[0] if arguments else None).parse_args(arguments)
        module = "profile" if parsed.command == "check" else parsed.command
        return parsed, importlib.import_module(f"lt_runtime.cli.{module}")
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _flush() -> None:
    """Flushes stdout before the process ends, because Python prints a traceback if its own last flush fails."""
    if sys.stdout is None:  # stdout is None if it was closed when the process began
        return
    try:
        sys.stdout.flush()
    except OSError:
        import os

        # stdout becomes the null device, which takes the output that could not be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _tell(name: str, complaint: str, status: int) -> int:
    from lt_runtime.errors import printable

    print(f"{name}: {printable(complaint)}", file=sys.stderr, flush=True)
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
