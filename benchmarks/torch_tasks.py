"""Models and batches of the suite `torch`, and the parts (`Kit`) that each library supplies; needs PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
NORM_EPSILON = 1e-6


class Kit(NamedTuple):
    """The parts of a training step that a library supplies.

    Attributes:
        adapt: function that replaces parts of a PyTorch model by the library's, in place.
        norm: makes an RMSNorm of a width.
        gated: makes a SwiGLU block of a width and a hidden width, which is called with x and a residual.
        layer: makes a linear layer with GELU, of as many inputs as outputs; returns a function and the parameters.
        cross_entropy: the cross-entropy of logits (N, C) and labels (N,).
        head: the cross-entropy of x (N, K), a weight (C, K) and labels (N,).
        optimizer: makes AdamW.
    """

    adapt: Callable[[Any], object]
    norm: Callable[[int], nn.Module]
    gated: Callable[[int, int], nn.Module]
    layer: Callable[[int], tuple[Any, list[Any]]]
    cross_entropy: Callable[[Any, Any], Tensor]
    head: Callable[[Any, Any, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)) + residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, add: Tensor) -> Tensor:
        """Computes the output for x (M, width) and the residual `add` (M, width)."""
        return add + self.down(self.product(self.gate(x), self.up(x)))

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activated gate times the up projection."""
        return functional.silu(gate) * up


def _layer(size: int) -> tuple[Any, list[Any]]:
    made = nn.Linear(size, size)
    weight, bias = made.weight, made.bias
    return lambda x: functional.gelu(functional.linear(x, weight, bias), approximate="tanh"), [weight, bias]


def of_torch() -> Kit:
    """PyTorch's own modules, losses and optimizer, as a `Kit`: the parts of a training step from one library."""

    def head(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight), labels)

    def optimizer(parameters: Sequence[Any], **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True, capturable=parameters[0].is_cuda, **options)

    norm = partial(nn.RMSNorm, eps=NORM_EPSILON)
    return Kit(lambda model: None, norm, Gated, _layer, functional.cross_entropy, head, optimizer)


def of_lt(precision: Any = None) -> Kit:
    """The modules, losses and optimizer of `lt_runtime.torch`, optionally with products in FP8."""
    import lt_runtime.torch as ltt

    def layer(size: int) -> tuple[Any, list[Any]]:
        made = ltt.Linear(size, size, activation="gelu")
        return made, [*made.parameters()]

    adapt, norm = partial(ltt.replace, precision=precision), partial(ltt.RMSNorm, eps=NORM_EPSILON)
    gated = partial(ltt.FeedForward, activation="silu", gated=True, bias=False, precision=precision)
    return Kit(adapt, norm, gated, layer, ltt.cross_entropy, ltt.linear_cross_entropy, ltt.AdamW)


def of_liger() -> Kit:
    """Liger's modules and losses, with PyTorch's where Liger has none."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerRMSNorm

    class LigerGated(Gated):
        def product(self, gate: Tensor, up: Tensor) -> Tensor:
            """See `Gated`."""
            return LigerSiLUMulFunction.apply(gate, up)

    head = LigerFusedLinearCrossEntropyLoss()
    own = {"norm": partial(LigerRMSNorm, eps=NORM_EPSILON), "gated": LigerGated}
    # Compiled, the head is wrong where labels are ignored: https://github.com/linkedin/Liger-Kernel/pull/1338.
    alone = torch.compiler.disable(lambda x, weight, labels: head(weight, x, labels))
    return of_torch()._replace(**own, head=alone)


def of_torchao() -> Kit:
    """PyTorch's modules, losses and optimizer, with products in FP8 by torchao's fastest recipe."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    adapt = partial(convert_to_float8_training, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    return of_torch()._replace(adapt=adapt, gated=lambda width, hidden: adapt(Gated(width, hidden)))


KITS = {"lt": of_lt, "torch": of_torch, "liger": of_liger, "lt_fp8": partial(of_lt, "fp8"), "torchao": of_torchao}


class Task(NamedTuple):
    """A model in training.

    Attributes:
        parameters: all tensors that get gradients.
        cost: the loss of a batch.
        batch: makes a batch of random inputs and targets.
        trains: whether an optimizer updates the parameters.
        gradient: the gradient that backward starts from; None for a cost of a single value.
    """

    parameters: Sequence[Any]
    cost: Callable[..., Tensor]
    batch: Callable[[], tuple[Tensor, ...]]
    trains: bool = True
    gradient: Any = None


def _model(kit: Kit, model: nn.Module) -> Any:
    """Replaces modules of a PyTorch model by a library's, which `kit` describes, and sets the model's training mode."""
    kit.adapt(model)
    return model.train()


def gpt2(kit: Kit, batch: int = 8, tokens: int = 1024, chunked: bool = False, **sizes: int) -> Task:
    """GPT-2 without dropout. With `chunked`, the library's `head` computes the last layer together with the loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **drops, use_cache=False)
    model: Any = GPT2LMHeadModel(config)
    # This is the default value; setting it avoids a warning of transformers, at which torch.compile would stop.
    model.loss_type = "ForCausalLM"
    _model(kit, model)

    def cost(ids: Tensor) -> Tensor:
        if not chunked:
            return model(ids, labels=ids).loss
        hidden = model.transformer(ids).last_hidden_state.flatten(0, 1)
        return kit.head(hidden, model.lm_head.weight, functional.pad(ids[:, 1:], (0, 1), value=-100).flatten())

    return Task([*model.parameters()], cost, lambda: (torch.randint(config.vocab_size, (batch, tokens)),))


def bert(kit: Kit, batch: int = 32, tokens: int = 128, **sizes: Any) -> Task:
    """BERT with its language model's last layer; the loss counts every token."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**sizes)
    model = _model(kit, BertForMaskedLM(config))

    def cost(ids: Tensor, labels: Tensor) -> Tensor:
        return kit.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())

    return Task([*model.parameters()], cost, lambda: (*torch.randint(config.vocab_size, (2, batch, tokens)),))


def vit(kit: Kit, batch: int = 64, classes: int = 1000, **sizes: Any) -> Task:
    """ViT with a head of classes, without dropout; ViT-L/16 if left at its sizes."""
    from transformers import ViTConfig, ViTForImageClassification

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = ViTConfig(**large | sizes, num_labels=classes)
    model = _model(kit, ViTForImageClassification(config))
    shape = batch, 3, config.image_size, config.image_size

    def cost(images: Tensor, labels: Tensor) -> Tensor:
        return kit.cross_entropy(model(images).logits, labels)

    return Task([*model.parameters()], cost, lambda: (torch.randn(shape), torch.randint(classes, (batch,))))


def t5(kit: Kit, batch: int = 32, tokens: int = 256, **sizes: Any) -> Task:
    """T5 with as many tokens in the decoder as in the encoder; T5-small if left at its sizes."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(**sizes, use_cache=False)
    model = _model(kit, T5ForConditionalGeneration(config))

    def cost(ids: Tensor, before: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=ids, decoder_input_ids=before).logits
        return kit.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Task([*model.parameters()], cost, lambda: (*torch.randint(config.vocab_size, (3, batch, tokens)),))


class _Block(nn.Module):
    """x + SwiGLU(RMSNorm(x))."""

    def __init__(self, kit: Kit, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.block = kit.norm(width), kit.gated(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The output for x (M, width)."""
        return self.block(self.norm(x), add=x)


def stack(kit: Kit, rows: int, width: int, hidden: int, layers: int = 1) -> Task:
    """Residual blocks made of one library's modules, with the mean squared error as the loss."""
    model = nn.Sequential(*(_Block(kit, width, hidden) for _ in range(layers)))
    return _regression(model, rows, width, width)


def mlp(kit: Kit, rows: int, dims: Sequence[int]) -> Task:
    """An MLP with ReLU, with the mean squared error as the loss."""
    pairs = [(nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in itertools.pairwise(dims)]
    model = _model(kit, nn.Sequential(*itertools.chain(*pairs))[:-1])
    return _regression(model, rows, dims[0], dims[-1])


def _regression(model: nn.Module, rows: int, inputs: int, outputs: int) -> Task:
    def cost(x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(model(x), target)

    return Task([*model.parameters()], cost, lambda: (torch.randn(rows, inputs), torch.randn(rows, outputs)))


def head(kit: Kit, rows: int, width: int, classes: int) -> Task:
    """The last layer of a language model and its loss, forward and backward, without an optimizer."""
    x, weight = torch.randn(rows, width).requires_grad_(), torch.randn(classes, width).div_(width**0.5).requires_grad_()
    batch = partial(torch.randint, classes, (rows,))
    return Task([x, weight], lambda labels: kit.head(x, weight, labels), lambda: (batch(),), trains=False)


def layer(kit: Kit, size: int) -> Task:
    """A linear layer with GELU over as many rows as it has columns, forward and backward, without an optimizer."""
    function, parameters = kit.layer(size)
    x, dy = torch.randn(size, size).requires_grad_(), torch.randn(size, size)
    return Task([x, *parameters], lambda: function(x), lambda: (), trains=False, gradient=dy)
