"""Chains of layers: the forward and backward problems of layers that feed each other, and their dependencies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

from lt_runtime.arguments import shown
from lt_runtime.errors import ArgumentError
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.kernels.mlp import supports
from lt_runtime.layout import packed
from lt_runtime.plans.cache import LayerProblem, known_layer, strategies_of
from lt_runtime.plans.strategies import forward_strategies, kept_spec, unchanged
from lt_runtime.problem import (
    ALIGNMENT,
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    MLPProblem,
    Saved,
    Spec,
)
from lt_runtime.store.keys import Problem
from lt_runtime.store.plan_store import PlanStore

_LINEAR: Final = Activation()


class Layer(NamedTuple):
    """A layer's forward and backward problem; None for a pass that is not run."""

    forward: ForwardProblem | None = None
    backward: BackwardProblem | None = None


class Part(NamedTuple):
    """Problems that the tuner decides together, each given by the index of its layer; None for an absent problem.

    A part has a forward problem, the backward problem that reads its saved tensor, or both.
    """

    forward: int | None
    backward: int | None


@dataclass(frozen=True, slots=True)
class LayerChain:
    """Layers in the order in which their forward passes run.

    Layer i's y is layer i+1's x, and layer i+1's dx is layer i's dy. A backward problem with an `input_derivative`
    multiplies dx by the derivative of the activation of the layer below, and computes that layer's bias gradient.
    Otherwise the backward problem of the layer below does both, by its `output_derivative`.
    """

    layers: tuple[Layer, ...]

    @classmethod
    def of_mlp(
        cls,
        rows: int,
        dims: Sequence[int],
        activation: Activation | Sequence[Activation],
        dtype: DType,
        compute: Compute,
        *,
        output_activation: Activation = _LINEAR,
        dropout: bool | Sequence[bool] = False,
        bias: bool | Sequence[bool] = True,
        input_gradient: bool = False,
    ) -> LayerChain:
        """The problems of a training step of an MLP; every matrix is row-major and contiguous.

        Args:
            rows: M of every layer.
            dims: inputs of the first layer, then outputs of each layer.
            activation, dropout: value for all layers but the last; or a list or tuple with one for each layer.
            output_activation: activation of the last layer, if `activation` is a single one.
            bias: whether the layers have a bias; or a list or tuple with one for each layer.
            input_gradient: whether the first layer's dx is computed; every other layer's dx always is.

        Raises:
            ArgumentError: there are fewer than two dims; or `rows` or one of the dims is not a positive integer.
        """
        if len(dims) < 2:
            raise ArgumentError(f"dims is {list(dims)}; accepted are two or more: inputs, then outputs of each layer")
        for name, value in (("rows", rows), *(("dims", each) for each in dims)):
            if type(value) is not int or not 1 <= value < 1 << 48:
                raise ArgumentError(f"{name} has {shown(value)}; accepted are integers of at least 1, below 2**48")
        given: Any = (activation, output_activation), (bias, bias), (dropout, False)
        options = [
            value if isinstance(value, (list, tuple)) else [*[value] * (len(dims) - 2), last] for value, last in given
        ]
        forwards = []
        for (k, n), kind, has_bias, drops in zip(itertools.pairwise(dims), *options, strict=True):
            specs, alignment = (_spec(rows, k), _spec(n, k), _spec(rows, n)), ALIGNMENT if has_bias else None
            forwards.append(ForwardProblem(dtype, compute, kind, *specs, alignment, dropout=drops, backward=True))
        backwards = [*map(plain_backward, forwards)]
        if not input_gradient:
            backwards[0] = replace(backwards[0], dx=None)
        for index, below in enumerate(forwards[:-1]):
            backwards[index] = replace(backwards[index], output_derivative=unchanged(db=None))
            backwards[index + 1] = replace(backwards[index + 1], input_derivative=derivative_of(below))
        return cls(tuple(map(Layer, forwards, backwards)))

    @classmethod
    def of_fp8(cls, problem: Fp8ChainProblem) -> LayerChain:
        """The chain of the layers whose precision is chosen, in their own type instead of FP8."""
        given = problem.rows, problem.dims, problem.activations, problem.dtype, problem.compute
        return cls.of_mlp(*given, bias=problem.biases, input_gradient=problem.dx)

    @classmethod
    def of_problem(cls, problem: LayerProblem | MLPProblem) -> LayerChain:
        """A chain of one problem or MLP; it includes the `plain_backward` of a forward problem that sets `backward`."""
        if isinstance(problem, MLPProblem):
            return cls.of_narrow(problem)
        if isinstance(problem, BackwardProblem):
            return cls((Layer(None, problem),))
        return cls((Layer(problem, plain_backward(problem) if problem.backward else None),))

    @classmethod
    def of_narrow(cls, problem: MLPProblem) -> LayerChain:
        """The chain of a narrow MLP's layers."""
        options = problem.activation, problem.dtype, Compute.FLOAT32
        chain = cls.of_mlp(problem.rows, problem.dims, *options, bias=problem.biases)
        if problem.backward:
            return chain
        return cls(tuple(Layer(replace(each, backward=False)) for each in chain.forwards.values()))

    def narrow(self, device: int) -> list[MLPProblem]:
        """The chain as `MLPProblem`s, with gradients once with a loss and once without; none if it cannot be fused."""
        forwards = [*self.forwards.values()]
        if len(forwards) < max(2, len(self.layers)):
            return []
        first = forwards[0]
        dims = (first.x.layout.cols, *(each.y.layout.cols for each in forwards))
        biases, backward = tuple(each.bias is not None for each in forwards), bool(self.backwards)
        problem = MLPProblem(first.dtype, first.x.layout.rows, dims, biases, first.activation, backward)
        if not supports(problem, device) or LayerChain.of_narrow(problem) != self:
            return []
        return [replace(problem, loss=True), problem] if backward else [problem]

    @property
    def forwards(self) -> dict[int, ForwardProblem]:
        """The forward problems by the index of their layer."""
        return {index: layer.forward for index, layer in enumerate(self.layers) if layer.forward is not None}

    @property
    def backwards(self) -> dict[int, BackwardProblem]:
        """The backward problems by the index of their layer."""
        return {index: layer.backward for index, layer in enumerate(self.layers) if layer.backward is not None}

    @property
    def runs(self) -> list[tuple[int, LayerProblem]]:
        """All problems in the order in which they run, each with the index of its layer."""
        return [*self.forwards.items(), *reversed(self.backwards.items())]

    @property
    def problems(self) -> list[LayerProblem]:
        """The distinct problems, in the order in which they first run."""
        return list(dict.fromkeys(problem for _, problem in self.runs))

    def reader(self, index: int) -> tuple[int, str] | None:
        """Finds the backward problem that reads the tensor saved by layer `index`.

        Returns:
            The index of the problem's layer, and the field of the problem that describes the derivative computed from
            the tensor ("output_derivative" or "input_derivative"); None if no backward problem reads the tensor.
        """
        for at, field in ((index + 1, "input_derivative"), (index, "output_derivative")):
            derivative = getattr(self.backwards.get(at), field, None)
            if derivative is not None:
                return (at, field) if index in self.forwards and derivative.saved is not Saved.NOTHING else None
        return None

    def keeping(self, saved: Mapping[int, Saved | None]) -> LayerChain:
        """A copy of the chain in which layers save other kinds of tensors.

        Args:
            saved: kind of the saved tensor by the index of the layer; with None the layer saves what it saved before.
        """
        layers = [*self.layers]
        for index, kept in saved.items():
            reader = self.reader(index)
            if reader is not None and kept is not None:
                at, field = reader
                backward: Any = layers[at].backward
                spec = _saved_spec(self.forwards[index], kept)
                derivative = replace(getattr(backward, field), saved=kept, saved_spec=spec)
                layers[at] = layers[at]._replace(backward=replace(backward, **{field: derivative}))
        return LayerChain(tuple(layers))

    @property
    def plain(self) -> LayerChain:
        """The chain with the saved tensors of the plainest strategies (no epilogues), regardless of present plans."""
        return self.keeping({index: _plainest(each) for index, each in self.forwards.items()})

    @property
    def parts(self) -> list[Part]:
        """All parts of the chain, in the order in which they are decided.

        A backward problem with two derivatives belongs to two parts: first to the part of the layer below, then to the
        part of its own layer.
        """
        readers = {index: reader[0] for index in self.forwards if (reader := self.reader(index))}
        alone = [Part(index, None) for index in self.forwards if index not in readers]
        rest = [Part(None, index) for index in self.backwards if index not in readers.values()]
        read = [Part(*each) for each in readers.items()]
        return [*alone, *sorted([*rest, *read], key=lambda part: -(part.backward or 0))]

    def cut(self, part: Part) -> LayerChain:
        """A part of this chain as a separate chain."""
        forward = None if part.forward is None else self.layers[part.forward].forward
        backward = None if part.backward is None else self.layers[part.backward].backward
        if None in part or part.forward == part.backward:
            return LayerChain((Layer(forward, backward),))
        return LayerChain((Layer(forward), Layer(None, backward)))


Tunable: TypeAlias = LayerChain | MatmulProblem | Fp8ChainProblem
"""A problem to tune: a chain of layers, a product, or the choice whether layers run in FP8."""


def saved_as(problem: ForwardProblem, store: PlanStore) -> Saved | None:
    """Kind of the tensor that a forward problem saves, read from its entry in the plan cache; None without an entry."""
    entry = known_layer(problem, store)
    return None if entry is None else Saved(entry.strategy["saved"])


def as_decided(chain: LayerChain, store: PlanStore) -> LayerChain:
    """A copy of the chain whose layers save the kinds of tensors that their entries in the plan cache name."""
    return chain.keeping({index: saved_as(each, store) for index, each in chain.forwards.items()})


def saved_kinds(problem: LayerProblem) -> tuple[Saved, ...]:
    """The distinct kinds of tensors that the strategies of a forward problem save."""
    return tuple(dict.fromkeys(getattr(strategy, "saved", Saved.NOTHING) for strategy in strategies_of(problem)))


def derivative_of(problem: ForwardProblem) -> Derivative:
    """The derivative of a layer's activation and dropout, with the layer's bias gradient.

    The derivative reads the tensor that is saved by the plainest strategy: a product without epilogue, then our pass.
    """
    db, saved = None if problem.bias is None else ALIGNMENT, _plainest(problem)
    return Derivative(problem.activation, saved, _saved_spec(problem, saved), db, problem.dropout)


def _plainest(problem: ForwardProblem) -> Saved:
    """Kind of the tensor that the last strategy saves, the plainest: a product without epilogue, then our pass."""
    *_, last = forward_strategies(problem)
    return last.saved


def plain_backward(problem: ForwardProblem) -> BackwardProblem:
    """The backward problem of `lt.linear_bwd` for a layer when every gradient is requested."""
    dx, dw, dy = (_spec(*each.layout.shape) for each in (problem.x, problem.w, problem.y))
    return BackwardProblem(problem.dtype, problem.compute, problem.x, problem.w, dy, derivative_of(problem), dx, dw)


def _saved_spec(problem: ForwardProblem, saved: Saved) -> Spec | None:
    if saved is Saved.NOTHING:
        return None
    return problem.y if saved is Saved.OUTPUT else kept_spec(problem, saved)


def _spec(rows: int, cols: int) -> Spec:
    return Spec(packed(rows, cols))


def chains_of(problems: Iterable[Problem]) -> list[LayerChain | MatmulProblem]:
    """Joins problems of a flat list, such as a recording, to chains; matrix products stay single.

    A backward problem forms a chain with the forward problems whose saved tensors it reads. A flat list does not say
    which these are, so that they are inferred from equal shapes; of several that fit, the last is taken. Every other
    forward problem is a chain by itself.
    """
    distinct = list(dict.fromkeys(problems))
    forwards = [each for each in distinct if isinstance(each, ForwardProblem)]
    chains = [_with_forwards(each, forwards) for each in distinct if isinstance(each, BackwardProblem)]
    taken = {layer.forward for chain in chains for layer in chain.layers}
    alone = [LayerChain((Layer(each),)) for each in forwards if each not in taken]
    return [*alone, *chains, *(each for each in distinct if isinstance(each, MatmulProblem))]


def _with_forwards(problem: BackwardProblem, forwards: Iterable[ForwardProblem]) -> LayerChain:
    """Makes a chain of a backward problem and the forward problems of its own layer and of the layer below."""
    of_below, own, below = problem.input_derivative, problem.output_derivative, list[Layer]()
    layer = Layer(None, problem)
    for each in forwards:
        if (each.dtype, each.compute) == (problem.dtype, problem.compute):
            if of_below is not None and each.y == problem.x and _fits(each, of_below):
                below = [Layer(each)]
            is_own = (each.x, each.w, each.y.layout.shape) == (problem.x, problem.w, problem.dy.layout.shape)
            if is_own and not own.is_identity and _fits(each, own):
                layer = Layer(each, problem)
    return LayerChain((*below, layer))


def _fits(forward: ForwardProblem, derivative: Derivative) -> bool:
    """Whether a `Derivative` is the derivative of a forward problem's activation and dropout."""
    is_same = (forward.activation, forward.dropout) == (derivative.activation, derivative.dropout)
    has_bias = derivative.db is None or forward.bias is not None
    return is_same and has_bias and derivative.saved in saved_kinds(forward)
