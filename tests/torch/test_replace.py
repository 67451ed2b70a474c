"""`ltt.replace` and `ltt.restore`: equal results, parameters and keys, and modules that are left alone."""

from __future__ import annotations

import copy
import operator
import pickle
import sys
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn

import lt_runtime.torch as ltt
from lt_runtime.errors import ArgumentError

MODULE = sys.modules["lt_runtime.torch.replace"]  # found by name, because `ltt.replace` is a function of that name

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # some norms and losses are computed in FP32
IDS = torch.arange(18).reshape(2, 9) * 7 % 60
SMALL: dict[str, Any] = {"vocab_size": 64}
BERT_LIKE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=32, **SMALL, **options)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT_LIKE, **SMALL))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**BERT_LIKE, **SMALL))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**BERT_LIKE, **SMALL, head_dim=8, num_key_value_heads=2)
    )


def t5(**options: Any) -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **SMALL, **options))


def gated_t5() -> Any:
    return t5(feed_forward_proj="gated-gelu")


def vit(**options: Any) -> Any:
    config = transformers.ViTConfig(**BERT_LIKE, image_size=8, patch_size=4, **options)
    return transformers.ViTForImageClassification(config)


def sequence() -> Any:
    inner = nn.LayerNorm(16), nn.Linear(16, 16, bias=False), nn.LeakyReLU(0.2), nn.Linear(16, 4)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), *inner, nn.RMSNorm(4), nn.Softplus())


def encoder() -> Any:
    return nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)


def decoder() -> Any:
    return nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)


def arguments_of(model: Any) -> dict[str, Any]:
    """The arguments with which a model of this test file is called."""
    torch.manual_seed(1)
    model = getattr(model, "_orig_mod", model)
    dtype = next(model.parameters()).dtype
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=dtype), "labels": torch.tensor([0, 1])}
    if isinstance(model, transformers.PreTrainedModel):
        return {"input_ids": IDS, "labels": IDS}
    x = torch.randn(2, 5, 8, dtype=dtype)
    if isinstance(model, nn.TransformerDecoderLayer):
        return {"tgt": x, "memory": x}
    return {"input" if isinstance(model, nn.Sequential) else "src": x}


def step(model: Any, **more: Any) -> list[Any]:
    """The loss and the gradients of all parameters."""
    model.zero_grad()
    out = model(**arguments_of(model), **more)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.square().sum().backward()
    return [loss.detach(), *[each.grad.clone() for each in model.parameters()]]


def places(report: Any) -> set[str]:
    return {f"{each.name}: {each.kind}" for each in report if each.replaced}


MODELS: dict[Callable[[], Any], set[str]] = {
    gpt2: {
        "transformer.h.0: GPT2Block",
        "transformer.h.0.mlp: GPT2MLP",
        "transformer.h.0.attn.c_attn: Conv1D",
        "transformer.ln_f: LayerNorm",
    },
    bert: {
        "bert.encoder.layer.0: BertLayer",
        "bert.encoder.layer.0.attention.output: BertSelfOutput",
        "bert.embeddings.LayerNorm: LayerNorm",
    },
    llama: {
        "model.layers.0: LlamaDecoderLayer",
        "model.layers.0.mlp: LlamaMLP",
        "model.norm: LlamaRMSNorm",
        "lm_head: Linear",
        "loss_function: ForCausalLMLoss",
    },
    qwen3: {
        "model.layers.0: Qwen3DecoderLayer",
        "model.layers.0.mlp: Qwen3MLP",
        "model.layers.0.self_attn.q_norm: Qwen3RMSNorm",
    },
    t5: {"encoder.block.0.layer.1.DenseReluDense: T5DenseActDense", "encoder.final_layer_norm: T5LayerNorm"},
    gated_t5: {"encoder.block.0.layer.1.DenseReluDense: T5DenseGatedActDense"},
    vit: {"vit.layers.0: ViTLayer", "vit.layers.0.mlp: ViTMLP", "vit.layers.0.attention.q_proj: Linear"},
    sequence: {": Sequential", "3: LayerNorm", "7: RMSNorm"},
    encoder: {": TransformerEncoderLayer", "norm1: LayerNorm", "norm2: LayerNorm"},
    decoder: {": TransformerDecoderLayer", "norm3: LayerNorm"},
}


@pytest.mark.parametrize("make", MODELS)
def test_a_model_computes_the_same_and_so_do_its_copies_until_it_is_restored(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    expected, state, parameters = step(model), model.state_dict(), [*map(id, model.parameters())]
    report = ltt.replace(model)
    assert MODELS[make] <= places(report)
    assert all(each.reason == "not measured" for each in report if each.replaced)
    assert list(model.state_dict()) == list(state)
    assert [*map(id, model.parameters())] == parameters
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(step(each), expected, **CLOSE)
        assert places(ltt.replace(each)) == places(report)
    with torch.no_grad():
        torch.testing.assert_close(model(**arguments_of(model))[0], make_like(model, state)(**arguments_of(model))[0])
    ltt.restore(model)
    torch.testing.assert_close(step(model), expected, rtol=0, atol=0)
    assert not any(hasattr(each, "replaces") for each in model.modules())


def make_like(model: Any, state: Any) -> Any:
    """A copy of a restored model with the state of another."""
    other = copy.deepcopy(model)
    ltt.restore(other)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("make", [gpt2, llama, sequence])
def test_a_replaced_model_compiles_without_a_break(make: Callable[[], Any]) -> None:
    model = make().double().eval()
    model.loss_type = "ForCausalLM"  # without a loss_type transformers warns, and torch.compile breaks at the warning
    ltt.replace(model)
    expected = step(model)
    torch.testing.assert_close(step(torch.compile(model, fullgraph=True, backend="aot_eager")), expected, **CLOSE)


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_generation_with_a_cache_gives_the_same_tokens(make: Callable[[], Any]) -> None:
    model, options = make().double().eval(), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    ltt.replace(model)
    assert torch.equal(model.generate(IDS, attention_mask=torch.ones_like(IDS), **options), expected)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("make", [gpt2, bert, gated_t5, sequence])
def test_under_autocast_types_are_those_of_the_model(make: Callable[[], Any]) -> None:
    model = make().eval()

    def run() -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return step(model)

    expected = run()
    ltt.replace(model)
    for ours, theirs in zip(run(), expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours - theirs).norm() <= 0.05 * theirs.norm() + 1e-6


def test_keywords_may_come_in_any_order_and_must_be_the_class_s() -> None:
    module = bert().double().eval().bert.encoder.layer[0].attention.output
    given = {name: torch.randn(2, 16, dtype=torch.float64) for name in ("hidden_states", "input_tensor")}
    expected = module(**given)
    ltt.replace(module)
    for names in (("hidden_states", "input_tensor"), ("input_tensor", "hidden_states")):
        torch.testing.assert_close(module(**{name: given[name] for name in names}), expected, **CLOSE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        module(given["hidden_states"], other=given["input_tensor"])


def hidden(*shape: int) -> Any:
    return torch.randn(shape or (2, 9, 16), dtype=torch.float64)


@pytest.mark.parametrize("make", [lambda: gpt2().transformer.h[0], lambda: vit().vit.layers[0]])
def test_a_transformer_s_layer_has_no_sum_of_its_own(make: Callable[[], Any]) -> None:
    layer, graphs, x = make().double().eval(), list[Any](), hidden()
    expected = layer(x)
    ltt.replace(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    torch.testing.assert_close(compiled(x), expected, **CLOSE)
    assert not [each for each in graphs[0].graph.nodes if each.target in (operator.add, operator.iadd, torch.add)]


def test_a_transformer_s_layer_takes_its_arguments_by_place_and_by_name() -> None:
    layer = gpt2(add_cross_attention=True).double().eval().transformer.h[0]
    x, mask, encoded = hidden(), torch.where(hidden(2, 1, 9, 9) > 0, 0.0, -5.0), hidden(2, 4, 16)
    calls = [((x, None, mask), {}), ((x,), {"attention_mask": mask}), ((), {"hidden_states": x})]
    calls += [((x, None, mask, encoded), {}), ((x,), {"encoder_hidden_states": encoded})]
    expected = [layer(*arguments, **keywords) for arguments, keywords in calls]
    ltt.replace(layer)
    found = [layer(*arguments, **keywords) for arguments, keywords in calls]
    torch.testing.assert_close(found, expected, **CLOSE)
    with pytest.raises(TypeError, match="multiple values"):
        layer(x, None, mask, attention_mask=mask)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_hooks_of_attention_see_the_arguments_of_the_class(make: Callable[[], Any]) -> None:
    model, seen = make(), list[Any]()
    attention = next(each for name, each in model.named_modules() if name.endswith("attn"))
    attention.register_forward_pre_hook(lambda _, a, k: seen.append((len(a), {*k})), with_kwargs=True)
    for _ in range(2):
        model(IDS)
        ltt.replace(model)
    assert seen[0] == seen[1]


def test_a_transformer_s_layer_drops_what_it_adds() -> None:
    layer, x = vit(hidden_dropout_prob=0.99).double().vit.layers[0], hidden()
    ltt.replace(layer)
    assert 0.9 < (layer.train()(x) == x).double().mean() < 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [bert, llama])
def test_on_the_meta_device_shapes_and_types_are_those_of_the_model(make: Callable[[], Any], autocast: bool) -> None:
    with torch.device("meta"):
        model, ids = make().double(), torch.ones(2, 9, dtype=torch.int64)
    made = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(ids)[0]
        made.append((y.shape, y.dtype, y.device))
        ltt.replace(model)
    assert made[0] == made[1]


def test_parts_that_get_hooks_or_are_exchanged_later_are_called() -> None:
    model = sequence().double().eval()
    ltt.replace(model)
    x, seen = torch.randn(3, 8, dtype=torch.float64), []
    expected = model(x)
    model.register_forward_hook(lambda *_: None)
    assert ltt.replace(model)[0].replaced, "its own hooks do not change what a replaced module computes"
    handle = model[1].register_forward_hook(lambda *arguments: seen.append(arguments[2].shape))
    torch.testing.assert_close(model(x), expected)
    handle.remove()
    model[0] = nn.Sequential(model[0], nn.Identity())
    torch.testing.assert_close(model(x), expected)
    assert seen == [(3, 16)]


@pytest.mark.parametrize("is_early", [False, True])
def test_a_block_may_get_a_part_of_another_kind(is_early: bool) -> None:
    model = llama().double().eval()
    if not is_early:
        ltt.replace(model)
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, nn.Identity())
    report = {each.name: each for each in ltt.replace(model)}
    assert report["model.layers.0"].reason.startswith("a part is missing: 'Sequential' object has no attribute")
    found, layer.mlp = model(IDS)[0], layer.mlp[0]
    torch.testing.assert_close(found, model(IDS)[0], **CLOSE)
    layer.mlp = nn.Identity()
    ltt.restore(model)
    assert not any(hasattr(each, "replaces") for each in model.modules())


def test_dropout_is_applied_in_training_and_ruled_by_the_seed() -> None:
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU6(), nn.Linear(256, 256), nn.Dropout(0.25))
    ltt.replace(model)
    x, made = torch.randn(4, 8), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(model(x))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    kept = made[0] != 0
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(made[0][kept], model.eval()(x)[kept] / 0.75)


@pytest.mark.parametrize(
    "more", [{}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": IDS}, {"ignore_index": 7}]
)
def test_the_loss_of_a_language_model_is_that_of_transformers(more: dict[str, Any]) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = torch.randn(2, 9, 64, dtype=torch.bfloat16, requires_grad=True)
    expected, ours = (function(logits, IDS, 64, **more) for function in (ForCausalLMLoss, MODULE.causal_loss))
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad(each, logits)[0] for each in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=0.02, atol=1e-5)


class Scaled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def hooked(module: Any) -> Any:
    module.register_forward_hook(lambda *_: None)
    return module


def with_forward(module: Any) -> Any:
    module.forward = module.forward
    return module


def with_frozen_type(dtype: Any) -> Any:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    return layer


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "subclass": (lambda: Scaled(8, 8), "a subclass of Linear may compute something else"),
    "parametrized": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "a subclass of Linear may"),
    "hook": (lambda: hooked(nn.Linear(8, 8)), "it has hooks"),
    "forward": (lambda: with_forward(nn.LayerNorm(8)), "its forward was set from outside"),
    "float8": (lambda: with_frozen_type(torch.float8_e4m3fn), "a parameter is a Parameter of torch.float8_e4m3fn"),
    "types": (lambda: with_frozen_type(torch.bfloat16), "parameters are torch.bfloat16 on cpu and torch.float32 on"),
    "axes": (lambda: nn.LayerNorm((3, 8)), "it has no weight, or several axes"),
    "activation": (lambda: encoder_with(nn.Softplus()), "its parts do not run as one: Linear, Softplus, Dropout"),
    "part": (lambda: encoder_with(hooked(nn.ReLU())), "ReLU: it has hooks"),
    "residual": (lambda: with_part(bert_layer(), "output.LayerNorm", nn.Identity()), "Identity: it is no norm"),
    "holder": (lambda: with_part(bert_layer(), "intermediate", nn.Identity()), "Identity: it is no part that belongs"),
    "other": (lambda: nn.Conv1d(8, 8, 1), "the package has nothing for it"),
}


def bert_layer() -> Any:
    return bert().bert.encoder.layer[0]


def with_part(module: Any, name: str, part: Any) -> Any:
    module.set_submodule(name, part)
    return module


def encoder_with(activation: Any) -> Any:
    return nn.TransformerEncoderLayer(8, 2, 16, activation=activation)


@pytest.mark.parametrize("name", LEFT)
def test_what_may_compute_something_else_is_left_alone(name: str) -> None:
    module = LEFT[name][0]()
    kind = type(module)
    entries = {each.name: each for each in ltt.replace(module)}
    assert not entries[""].replaced
    assert entries[""].reason.startswith(LEFT[name][1])
    assert type(module) is kind
    assert "part" not in name or entries["linear1"].replaced


def test_a_block_that_is_left_alone_has_its_layers_replaced() -> None:
    entries = {each.name: each.replaced for each in ltt.replace(encoder_with(nn.Softplus()))}
    assert (entries[""], entries["linear1"], entries["linear2"], entries["norm1"]) == (False, True, True, True)


def test_modules_that_are_slower_in_a_measurement_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.LayerNorm(8), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16)
    slower = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.BatchNorm1d(8))
    model, seen = nn.Sequential(*[nn.Sequential(each) for each in layers], slower), []
    model[2].eval()
    state = copy.deepcopy(model.state_dict())

    def microseconds(function: Any, arguments: Any, leaves: Any) -> float:
        seen.append([tuple(each.shape) for each in (*arguments, *leaves)])
        if not hasattr(function.__self__, "replaces"):
            function(*arguments)
            return 2.0
        return 1.0 if isinstance(function.__self__, nn.Linear) else 3.0

    monkeypatch.setattr(MODULE, "_microseconds", microseconds)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: torch.enable_grad())
    report = ltt.replace(model, torch.randn(5, 8))
    found = {each.name: each[2:] for each in report}
    assert found["0.0"] == found["5"] == (False, "slower", 2.0, 3.0)
    assert found["1.0"] == found["3.0"] == found["4.0"] == found["5.0"] == (True, "faster", 2.0, 1.0)
    assert found["2.0"][0] is found["5.2"][0] is False
    assert [each[0].__class__.__bases__[0] is MODULE._Replaced for each in model] == [
        False,
        True,
        False,
        True,
        True,
        True,
    ]
    assert len(seen) == 5 * 2 * (MODULE._ROUNDS + 1)  # the layers of 16 by 16 are measured together
    assert seen[0] == [(5, 8), (5, 8), (8,), (8,)]
    assert [each.training for each in model] == [True, True, False, True, True, True]
    assert not any(each._forward_pre_hooks for each in model.modules())
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert [line.split()[:5] for line in str(report).splitlines() if "Linear" in line] == [
        ["*.*", "4", "Linear", "yes", "faster"]
    ]


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_example_inputs_may_be_keyword_arguments(kind: Any) -> None:
    model, seen = gpt2(), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
    ltt.replace(model, kind(input_ids=IDS))
    assert [each["input_ids"] is IDS for each in seen] == [True]


def test_the_measurement_restores_a_module_whose_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 8)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises((AssertionError, RuntimeError)):
        ltt.replace(layer, torch.randn(5, 8))
    assert type(layer) is nn.Linear


def test_wrong_arguments_are_named() -> None:
    for function in (ltt.replace, ltt.restore):
        with pytest.raises(TypeError, match=r"model is .*; it must be a torch\.nn\.Module"):
            function([nn.Linear(8, 8)])  # type: ignore[arg-type]
    layer = nn.Linear(8, 8)
    ltt.replace(layer)
    layer.__class__ = type("Wrapped", (type(layer),), {})
    with pytest.raises(ArgumentError, match=r"model is a Wrapped now; undo that before ltt\.restore"):
        ltt.restore(layer)
