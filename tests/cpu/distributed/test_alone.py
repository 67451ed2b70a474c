"""A group of one process, which no launcher has started."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.distributed import buckets
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


def test_arrays_that_cannot_be_summed_are_refused():
    group, fixed = lt.group(), np.zeros(2, np.float32)
    fixed.setflags(write=False)
    for array, message in (
        (np.zeros(2, bool), r"arrays\[1\] is bool; accepted are float16"),
        (np.zeros((2, 4), np.float32)[:, ::2], r"arrays\[1\] has strides"),
        (fixed, r"arrays\[1\] is read-only"),
        ([1.0], r"arrays\[1\] is a list"),
    ):
        with pytest.raises(lt.errors.OperandError, match=message):
            group.sum(np.zeros(2, np.float32), array)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: group.gather("a", "a test"), "value is 'a'; it must be bytes"),
        (lambda group: group.barrier(3), "what is 3; it must be a string"),
        (lambda group: group.agree({1, 2}, "a test"), r"value is {1, 2}; it must be of types that JSON has"),
    ],
)
def test_values_of_other_kinds_are_refused(call, message):
    with pytest.raises(lt.errors.KindError, match=message):
        call(lt.group())


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 2], r"rank 0 differs from rank 1 in a test: 1 on rank 0, 2 there"),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}], "b = 'missing' on rank 2, b = 2 there"),
        ([{"a": {"b": 1.0}}, {"a": {"b": 1}}], "a = b = 1 on rank 1, a = b = 1.0 there"),
        (
            ["AdamW(lr=0.001, betas=(0.9, 0.999))", "AdamW(lr=0.001, betas=(0.9, 0.95))"],
            r"95\)\)' on rank 1, .*999\)\)'",
        ),
        ([1, 1, 2, 3], r"rank 2 differs from rank 0 .* \(and 1 other ranks differ\)"),
    ],
)
def test_a_difference_names_a_rank_and_an_entry(values, message):
    texts = [b"a test\0" + json.dumps(each).encode() for each in values]
    wire = SimpleNamespace(rank=0, size=len(values), limit=1.0, gather=lambda value, what: texts)
    with pytest.raises(lt.errors.GroupError, match=message):
        groups.Group(wire).agree(values[0], "a test")


def test_a_failure_of_process_0_without_a_text_is_told_to_the_others():
    told = []
    wire = SimpleNamespace(rank=0, size=2, limit=1.0, gather=lambda value, what: told.append(value) or [value, value])
    with pytest.raises(MemoryError), groups.first_alone(groups.Group(wire), "saving"):
        raise MemoryError
    assert told[0].endswith(b"MemoryError")


def test_calls_for_other_purposes_are_told_apart():
    wire = SimpleNamespace(rank=0, size=2, limit=1.0, gather=lambda value, what: [b"the metrics\0[1]", b"a barrier\0"])
    with pytest.raises(lt.errors.GroupError, match="rank 1 waits for a barrier, but rank 0 for the metrics"):
        groups.Group(wire).gather(b"[1]", "the metrics")


def test_one_process_needs_no_nccl(monkeypatch):
    def nccl():
        raise lt.errors.MissingLibraryError("NCCL is not installed")

    monkeypatch.setattr("lt_runtime.distributed.nccl.nccl", nccl)
    assert isinstance(lt.group().engine(0), groups.Alone)
    with pytest.raises(lt.errors.MissingLibraryError):
        groups.Group(SimpleNamespace(rank=0, size=2, limit=1.0)).engine(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "batch_size is None; a step of a group needs"),
        ({"group": None, "shard_state": True}, "shard_state is True, but group is None"),
        ({"shard_state": True, "averaged": True}, "ema averages master copies"),
    ],
)
def test_options_that_do_not_fit_a_group_are_refused(options, message):
    model = lt.MLP([4, 2], dtype="bfloat16", device="cpu")
    optimizer, averaged = lt.AdamW(model.parameters()), options.pop("averaged", False)
    given = {"batch_size": 2, "group": lt.group(), "ema": lt.EMA(model) if averaged else None} | options
    with pytest.raises(lt.errors.ArgumentError, match=message):
        lt.TrainStep(model, optimizer, **given)


@pytest.mark.parametrize(
    ("rows", "message"),
    [((5, 5), "5 rows"), ((3, 2), "3 and 2 rows"), ((0, 0), "0 rows")],
)
def test_batches_that_cannot_be_shared_are_refused(rows, message):
    batch = np.zeros((rows[0], 3), np.float32), np.zeros(rows[1], np.int32)
    with pytest.raises(lt.errors.ShapeError, match=f"number 0 of batches has arrays of {message}"):
        next(lt.share([batch], lt.group(), 4))


def test_a_batch_without_inputs_is_refused():
    with pytest.raises(lt.errors.OperandError, match=r"number 0 of batches has \(\); it must have arrays"):
        next(lt.share([((), np.zeros(3, np.int32))], lt.group(), 4))


def test_weights_have_the_axes_that_inputs_and_target_share():
    for x, target, shape in (((5, 4), (), (4,)), ((5, 4), (5,), (4, 5)), ((5, 4), (2,), (4,)), ((4,), (3,), (4,))):
        batch = np.zeros((3, *x), np.float32), np.zeros((3, *target), np.float32)
        (_, _, weights), *_ = lt.share([batch], lt.group(), 4)
        assert weights.shape == shape
        assert weights.reshape(4, -1)[:, 0].tolist() == pytest.approx([4 / 3] * 3 + [0])


class _Engine(groups.Alone):
    """An engine that notes which gradients it is asked to sum."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.sums = list[list[str]]()

    def sum(self, arrays, stream):
        self.sums.append([each.tobytes().decode() for each in arrays])


def _buckets(monkeypatch):
    monkeypatch.setattr(buckets, "_BYTES", 1)
    engine = _Engine()
    made = [lt.Parameter(np.zeros(1, np.float32), np.frombuffer(name * 4, np.float32).copy()) for name in (b"a", b"b")]
    return engine, made, buckets.Buckets(groups.Group(engine), made, None)


def test_gradients_of_one_kernel_are_summed_at_the_end(monkeypatch):
    engine, (a, b), summed = _buckets(monkeypatch)
    for written in ([], [b, a]):
        engine.sums.clear()
        summed.begin(None)
        for each in written:
            summed.written([each])
        assert engine.sums == []
        summed.finish()
        assert engine.sums == [["aaaa"], ["bbbb"]]


def test_a_write_after_the_sum_is_refused(monkeypatch):
    _, (a, b), summed = _buckets(monkeypatch)
    for _ in range(2):
        summed.begin(None)
        summed.written([a])
        summed.written([b])
        summed.finish()
    summed.begin(None)
    summed.written([a])
    with pytest.raises(lt.errors.GroupError, match="more often"):
        summed.written([a])
