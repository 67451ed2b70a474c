"""A group of one process, which no launcher has started."""

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.distributed import group as groups
from lt_runtime.gpu import devices


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in (*groups._MPI, *groups._TORCHRUN):
        monkeypatch.delenv(name, raising=False)


def test_one_process_has_nothing_to_exchange():
    group = lt.group()
    values = np.arange(3, dtype=np.float32)
    group.sum(values)
    group.agree({"lr": 1.0}, "the options")
    assert values.tolist() == [0, 1, 2]
    assert (group.rank, group.size, group.gather(b"x", "a test")) == (0, 1, [b"x"])


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_timeout_is_positive(timeout):
    with pytest.raises(lt.errors.ArgumentError, match="timeout is"):
        lt.group(timeout=timeout)


@pytest.mark.parametrize(
    ("variable", "value", "ordinal"),
    [("LOCAL_RANK", "1", 1), ("MPI_LOCALRANKID", "3", 1), ("SLURM_LOCALID", "2", 0), ("SLURM_LOCALID", "", 0)],
)
def test_auto_is_the_gpu_of_a_process_on_its_machine(monkeypatch, variable, value, ordinal):
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    monkeypatch.setenv(variable, value)
    assert devices.parse_device("auto") == ordinal
