"""A training in which process 1 fails: `mpiexec -n N python -m tests.distributed.failing WAY`."""

import os
import signal
import sys
import time

import lt_runtime as lt
from tests.distributed.cases import Training, batches


def fail(way: str, group: lt.Group) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "hanging":
        time.sleep(60)
    if way == "raising":
        raise ValueError("no more data")
    if way == "ending early":
        sys.exit(0)
    if way == "in another order":
        group.barrier("the end of the epoch")


def main(way: str) -> None:
    group = lt.group(timeout=40.0 if way == "ending early" else 1.0)  # the others see the end before the timeout
    (x, labels), *_ = batches(1)
    with group.patience():  # a busy machine may take longer for the imports of some processes
        training = Training(group.size, group)
        training.step(x, labels)
    for i in range(3):
        if i == 1 and group.rank == 1:
            fail(way, group)
        training.step(x, labels)


if __name__ == "__main__":
    main(sys.argv[1])
