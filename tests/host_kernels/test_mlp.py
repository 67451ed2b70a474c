"""The kernels of a narrow MLP, launched by the runtime, against float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.kernels import mlp, tiling
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.kernels.mlp import Block, LossArguments, MlpBackward, MlpForward, Part, Target, fitting_parts, supports
from lt_runtime.problem import ACTIVATIONS, Activation, DType, MLPProblem
from lt_runtime.reference.activations import activate, derivative
from tests.host_kernels.arrays import EPSILON, FLAT, Guarded, vector
from tests.host_kernels.harness import FORWARD, REVERSE, SHUFFLED, HostKernels
from tests.host_kernels.products import Memory
from tests.host_kernels.variants import BF16, F16, F32
from tests.support.strategies import Placement

Array = NDArray[np.float64]
SMALL_GPU = DeviceInfo(0, "", 90, multiprocessors=1, memory=0)
SHARED = 227 << 10
ORDERS = (FORWARD, REVERSE, SHUFFLED)


@pytest.fixture(autouse=True)
def _on_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mlp, tiling):
        monkeypatch.setattr(module, "device_info", lambda _: SMALL_GPU)
    monkeypatch.setattr(mlp, "device_attributes", lambda _, *names: (SHARED,) * len(names))


@dataclass
class _Network:
    """A narrow MLP whose kernels are tested on the CPU.

    Weights, biases, inputs and the gradient of outputs are in guarded memory; their values are kept in float64.
    """

    problem: MLPProblem
    x: Guarded
    dy: Guarded
    weights: list[Guarded]
    biases: list[Guarded | None]

    @property
    def parameters(self) -> list[int]:
        pairs = zip(self.weights, self.biases, strict=True)
        return [each.address if each else 0 for pair in pairs for each in pair]

    def forward(self, host: HostKernels, order: int, placement: Placement = FLAT) -> Array:
        y = Guarded(np.full((self.problem.rows, self.problem.dims[-1]), 7.0), placement, self.problem.dtype)
        with host.in_order(order):
            made = MlpForward(self.problem, self.x.layout, y.layout, 0)
        memory = Memory()
        made.launch(Call((self.x.address, y.address, *self.parameters), 0), memory)
        memory.check()
        self._check_unchanged()
        return y.values()

    def loss(self, host: HostKernels, order: int, loss: ElementwiseLoss, scale: float) -> tuple[float, list[Array]]:
        """Runs forward and backward with a loss that has `dy` as targets.

        Returns the loss, and the gradients times half the scale.
        """
        value, factor = vector(np.full(1, np.nan), F32), vector(np.full(1, scale), F32)
        gradients = self.backward(host, order, None, loss, (value.address,), ((LossArguments(0.5), factor.address),))
        return float(value.values()[0, 0]), gradients

    def backward(
        self, host: HostKernels, order: int, start: float | None = None, loss: Any = None, more: Any = (), by: Any = ()
    ) -> list[Array]:
        """Runs the backward kernels; returns the gradients of all parameters.

        Args:
            start: value of every gradient before the pass, to which the pass adds; None for buffers of NaN.
            more: the address of the loss, if there is a loss.
            by: the scales of the loss's gradient, if there is a loss.
        """
        fill = np.nan if start is None else start
        kinds = [each for pair in zip(self.weights, self.biases, strict=True) for each in pair]
        grads = [each and Guarded(np.full(each.array.shape, fill), FLAT, self.problem.dtype) for each in kinds]
        with host.in_order(order):
            made = MlpBackward(self.problem, self.x.layout, self.dy.layout, start is not None, loss, 0)
        places = [each.address if each else 0 for each in grads]
        addresses = self.x.address, self.dy.address, *self.parameters, *places, *more
        memory = Memory()
        made.launch(Call(addresses, 0, *by), memory)
        memory.check()
        self._check_unchanged()
        return [each.values() for each in grads if each]

    def check(self, host: HostKernels, order: int, placement: Placement = FLAT) -> None:
        """Compares outputs and gradients with the exact ones, which need only be rounded once."""
        found = [self.forward(host, order, placement), *self.backward(host, order)]
        for made, exact in zip(found, [self.exact[1][-1], *self.exact_gradients], strict=True):
            assert np.array_equal(made, exact.astype(self.problem.dtype.numpy).astype(np.float64), equal_nan=True)

    def _check_unchanged(self) -> None:
        for each in (self.x, self.dy, *self.weights, *self.biases):
            if each:
                each.assert_unchanged()

    @property
    def exact(self) -> tuple[list[Array], list[Array]]:
        """Computes pre-activation and output of each layer, in float64 and never rounded."""
        h, zs, hs = _values(self.x), [], []
        for i, (w, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            z = h @ _values(w).T + (_values(bias)[0] if bias else 0.0)
            h = z if i == len(self.weights) - 1 else activate(z, self.problem.activation)
            zs.append(z)
            hs.append(h)
        return zs, hs

    @property
    def exact_gradients(self) -> list[Array]:
        return self.gradients_from(_values(self.dy))

    def gradients_from(self, dz: Array) -> list[Array]:
        """Computes the gradients of all parameters from the gradient of the outputs, in float64."""
        (zs, hs), found = self.exact, list[Array]()
        for i in reversed(range(len(self.weights))):
            below = hs[i - 1] if i else _values(self.x)
            found = [dz.T @ below, *([dz.sum(axis=0)[None]] if self.biases[i] else []), *found]
            if i:
                dz = (dz @ _values(self.weights[i])) * derivative(zs[i - 1], self.problem.activation)
        return found


def _values(array: Guarded) -> Array:
    return array.array.astype(np.float64)


def _network(
    dims: Sequence[int],
    rows: int,
    draw: Callable[[tuple[int, ...]], NDArray[Any]],
    *,
    dtype: DType = BF16,
    activation: str = "relu",
    biases: Sequence[bool] | None = None,
    placement: Placement = FLAT,
) -> _Network:
    has = tuple(biases) if biases is not None else (True,) * (len(dims) - 1)
    problem = MLPProblem(dtype, rows, tuple(dims), has, Activation(activation), backward=True)
    sizes = [*itertools.pairwise(dims)]
    return _Network(
        problem,
        Guarded(draw((rows, dims[0])), placement, dtype),
        Guarded(draw((rows, dims[-1])), placement, dtype),
        [Guarded(draw((n, k)), FLAT, dtype) for k, n in sizes],
        [vector(draw((n,)), dtype) if each else None for each, (_, n) in zip(has, sizes, strict=True)],
    )


def _integers(seed: int) -> Callable[[tuple[int, ...]], NDArray[Any]]:
    """Draws -1, 0 and 1, so that every sum that is rounded to 16 bits is exact."""
    generator = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> NDArray[Any]:
        values = generator.integers(-1, 2, shape)
        return np.where(generator.random(shape) < min(1.0, 5.0 / shape[-1]), values, 0)

    return draw


def _telling(dims: Sequence[int], rows: int, **options: Any) -> _Network:
    """Searches for a network of integers of which all sums are exact, and no result is zero everywhere."""
    for seed in itertools.count():
        network = _network(dims, rows, _integers(seed), **options)
        outputs = network.exact[1]
        are_exact = max(np.abs(each).max() for each in outputs) <= 256
        if are_exact and all(each.any() for each in (outputs[-1], *network.exact_gradients)):
            break
    return network


def _normal(seed: int) -> Callable[[tuple[int, ...]], NDArray[Any]]:
    generator = np.random.default_rng(seed)
    return lambda shape: generator.standard_normal(shape) / np.sqrt(shape[-1])


SHAPES = (
    ((16, 16, 16), 16),
    ((16, 32, 32, 16), 70),
    ((3, 16, 16, 16, 1), 33),
    ((20, 24, 9, 5), 129),
    ((1, 7, 2), 1),
    ((40, 16, 16, 24), 50),
    ((16, 48, 48, 40), 40),
    ((128, 32, 128), 20),
    ((8, 112, 3), 17),
    ((64, 64, 64, 64, 3), 200),
    ((24, 128, 128, 10), 35),
    ((128, 128, 128, 10), 20),
    ((48, 32, 16), 31),  # the rows make three tiles across two warps; the last chunk lacks one row
    ((24, 96, 90, 10), 35),
)


@pytest.mark.parametrize(("dims", "rows"), SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_exact_sums(host: HostKernels, dims: tuple[int, ...], rows: int, order: int) -> None:
    _telling(dims, rows).check(host, order)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_go_from_tile_to_tile(host: HostKernels, order: int) -> None:
    """The batch has more rows than all warps of the grid process at a time."""
    _network((8, 16, 8), 900, _integers(0)).check(host, order)


def test_the_sums_of_many_blocks_are_added_up(host: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "device_info", lambda _: replace(SMALL_GPU, multiprocessors=19))
    _network((8, 16, 8), 900, _integers(0)).check(host, FORWARD)


ACTIVATIONS_AND_TYPES = [(name, (BF16, F16)[i % 2]) for i, name in enumerate(ACTIVATIONS)]


@pytest.mark.parametrize(("activation", "dtype"), ACTIVATIONS_AND_TYPES, ids=str)
def test_activations(host: HostKernels, activation: str, dtype: DType) -> None:
    """The error must be within the sum of the layers' roundings: half a unit in the last place for each layer, which
    later layers pass on with a gain of about 1.
    """
    network = _network((20, 32, 24, 5), 75, _normal(7), dtype=dtype, activation=activation)
    outputs, gradients = network.exact[1][-1], network.exact_gradients
    assert _off(network.forward(host, SHUFFLED), outputs) < 4 * EPSILON[dtype]
    for made, exact in zip(network.backward(host, SHUFFLED), gradients, strict=True):
        assert _off(made, exact) < 12 * EPSILON[dtype]


LOSSES = {
    "mse": (ElementwiseLoss("mse"), reference.mse_loss),
    "huber": (ElementwiseLoss("huber", 0.25), functools.partial(reference.huber_loss, delta=0.25)),
    "bce_with_logits": (ElementwiseLoss("bce_with_logits"), reference.bce_with_logits),
}


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        *((name, dtype, (20, 32, 24, 5)) for name, dtype in (("mse", BF16), ("huber", F16), ("bce_with_logits", BF16))),
        *(("mse", BF16, dims) for dims in ((64, 64, 64, 64, 3), (16, 16, 40))),
    ],
    ids=str,
)
def test_losses(host: HostKernels, name: str, dtype: DType, dims: tuple[int, ...]) -> None:
    """The last chunk of rows and the last tile of outputs are partly empty, and warps process several chunks each."""
    network, (loss, exact_loss) = _network(dims, 299, _normal(2), dtype=dtype, activation="tanh"), LOSSES[name]
    outputs = network.exact[1][-1]
    value, dy = exact_loss(outputs, _values(network.dy))
    for order in ORDERS:
        made, gradients = network.loss(host, order, loss, 64.0)
        assert made == pytest.approx(value, rel=2 * EPSILON[dtype])
        for gradient, exact in zip(gradients, network.gradients_from(32 * dy), strict=True):
            assert _off(gradient, exact) < 12 * EPSILON[dtype]


def test_a_loss_is_that_of_rounded_outputs(host: HostKernels) -> None:
    """The loss compares rounded outputs, as a layer stores them: with these as targets, loss and gradients are 0."""
    network = _network((16, 16, 8), 20, _normal(5))
    outputs = network.forward(host, FORWARD)
    exact = replace(network, dy=Guarded(outputs, FLAT, BF16))
    made, gradients = exact.loss(host, FORWARD, ElementwiseLoss("mse"), 1.0)
    assert made == 0.0
    assert not any(each.any() for each in gradients)


def _off(made: Array, exact: Array) -> float:
    """Norm of the error relative to the norm of the exact result."""
    return float(np.linalg.norm(made - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("placement", [Placement(False, 3, 1), Placement(False, 8), Placement(True), Placement(gap=3)])
def test_any_layout(host: HostKernels, placement: Placement) -> None:
    _telling((24, 32, 16, 8), 50, placement=placement).check(host, REVERSE, placement)


@pytest.mark.parametrize("biases", list(itertools.product((False, True), repeat=3)), ids=str)
def test_absent_biases(host: HostKernels, biases: tuple[bool, ...]) -> None:
    _telling((16, 16, 16, 4), 40, biases=biases).check(host, FORWARD)


def test_gradients_are_added(host: HostKernels) -> None:
    network = _telling((16, 16, 4), 40)
    alone = network.backward(host, FORWARD)
    for made, exact in zip(network.backward(host, FORWARD, start=3.0), alone, strict=True):
        assert np.array_equal(made, exact + 3.0)


@pytest.mark.parametrize("multiprocessors", [1, 5])
def test_the_order_of_turns_changes_no_bit(
    host: HostKernels, monkeypatch: pytest.MonkeyPatch, multiprocessors: int
) -> None:
    monkeypatch.setattr(mlp, "device_info", lambda _: replace(SMALL_GPU, multiprocessors=multiprocessors))
    network = _network((20, 32, 24, 5), 300, _normal(3), activation="gelu")
    first, *others = (network.backward(host, order) for order in ORDERS)
    assert all(np.array_equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_infinity_and_nan_stay_in_their_rows_and_columns(host: HostKernels, value: float) -> None:
    """An infinite input makes a ReLU's output infinite or zero, depending on the weight's sign. NaN stays NaN, and
    ReLU's derivative at NaN is 1. An infinite or NaN input of one row affects no other row's outputs.
    """

    def draw(shape: tuple[int, ...]) -> NDArray[Any]:
        values = np.ones(shape)
        if shape == (40, 20):
            values[7, 3] = value
        elif shape[0] < 40:
            values[1::2] = -1
        return values

    network = _network((20, 9, 7, 3), 40, draw)
    with np.errstate(invalid="ignore"):
        outputs = network.exact[1][-1]
        network.check(host, FORWARD)
    assert np.flatnonzero(~np.isfinite(outputs).all(axis=1)).tolist() == [7]


def _taken(*dims: int, dtype: DType = BF16, rows: int = 8, backward: bool = True) -> bool:
    return supports(MLPProblem(dtype, rows, dims, (True,) * (len(dims) - 1), Activation("relu"), backward), 0)


@pytest.mark.parametrize(
    ("dims", "forward", "backward"),
    [
        *((dims, True, True) for dims in ((64, 64, 64, 64, 3), (1, 1, 1), (128, 128, 10), (16,) * 15)),
        *((dims, False, False) for dims in ((64, 64), (64, 129, 64), (129, 64, 64), (64, 64, 129), (16,) * 18)),
        ((128,) * 5, True, True),
        ((128,) * 6, True, False),  # in backward, shared memory is too small for so many layers
        ((128,) * 9, False, False),
    ],
    ids=str,
)
def test_supported_widths_and_depths(dims: tuple[int, ...], forward: bool, backward: bool) -> None:
    assert (_taken(*dims, backward=False), _taken(*dims)) == (forward, backward)


def _parts(*dims: int, rows: int = 1 << 20, activation: str = "relu") -> list[tuple[int, ...]]:
    """Records for each launch of backward: the first layer, the last layer, and the number of threads in a block."""
    problem = MLPProblem(BF16, rows, dims, (True,) * (len(dims) - 1), Activation(activation), True)
    return [
        (part.first, part.last, *part.block)
        for part in fitting_parts(problem, Target(SHARED, 132, moves_registers=True))
    ]


def test_blocks_fit_shared_memory_and_registers() -> None:
    assert _parts(64, 64, 64, 64, 3) == [(0, 3, 4, 2, 4)]
    assert _parts(64, 64, 64, 64, 3, rows=64) == [(0, 3, 4, 1, 4)], "one tile of rows is the shortest way"
    assert _parts(*[96] * 4, 3) == [(0, 3, 4, 1, 8)], "registers for the sums of four warps are too few"
    assert _parts(128, 128, 10) == [(0, 1, 4, 1, 4)], "a thread has registers for one tile of such rows"


def test_parts_are_as_few_as_can_be() -> None:
    assert _parts(*[128] * 4, 10) == [(1, 3, 4, 1, 8), (0, 0, 4, 1, 8)]
    assert _parts(*[128] * 4, 10, activation="gelu") == [(2, 3, 4, 1, 8), (0, 1, 4, 1, 8)]
    assert _parts(*[96] * 5) == [(2, 3, 4, 1, 4), (0, 1, 4, 1, 4)], "twice two row warps would be slower"


IN_PARTS = ([(2, 2), (0, 1)], [(1, 2), (0, 0)], [(2, 2), (1, 1), (0, 0)])


@pytest.mark.parametrize("parts", IN_PARTS)
def test_parts_make_what_one_launch_does(
    host: HostKernels, monkeypatch: pytest.MonkeyPatch, parts: list[tuple[int, int]]
) -> None:
    """Launches of some layers' gradients agree bit for bit with one launch of all, with and without a loss."""
    network, block = _network((20, 32, 24, 5), 300, _normal(3), activation="gelu"), Block(2, 1, 4)
    found = []
    for each in ([(0, 2)], parts):
        chosen = tuple(Part(*layers, block) for layers in each)
        monkeypatch.setattr(mlp, "fitting_parts", lambda *_, chosen=chosen: chosen)
        value, gradients = network.loss(host, SHUFFLED, ElementwiseLoss("mse"), 1.0)
        found.append([np.array(value), *gradients, *network.backward(host, SHUFFLED)])
    assert all(np.array_equal(one, two) for one, two in zip(*found, strict=True))


def test_other_problems_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _taken(64, 64, 64, rows=0)
    assert not _taken(64, 64, 64, dtype=F32)
    monkeypatch.setattr(mlp, "device_info", lambda _: replace(SMALL_GPU, capability=75))
    assert not _taken(64, 64, 64)
