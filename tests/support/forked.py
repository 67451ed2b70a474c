"""Runs a function in a forked process, so that it cannot change this process."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn


def forked(run: Callable[[], Any], limit_s: int = 300) -> Any:
    """Calls `run` in a forked process, which has only the calling thread; returns the result.

    Raises:
        AssertionError: `run` raised, or took longer than `limit_s` seconds.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # os.fork warns of other threads, but the test runner's threads hold no lock that the package needs
        child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(limit_s)
        _answer(run, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        raise AssertionError(f"the process ended without an answer, with status {os.waitstatus_to_exitcode(status)}")
    result, failure = pickle.loads(answer)
    if failure is not None:
        raise AssertionError(failure)
    return result


def _answer(run: Callable[[], Any], writing: int) -> NoReturn:
    answer: bytes = b""
    try:
        answer = pickle.dumps((run(), None))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    finally:
        with os.fdopen(writing, "wb") as answers:
            answers.write(answer)
        os._exit(0)  # ends the child without exit handlers, which belong to the parent
