"""Writes docs/README.md, which lists every public name: `python docs/make.py`.

A name's line is the first paragraph of its docstring. A test compares the page with what this script would write.
"""

import inspect
from pathlib import Path
from typing import Final

import lt_runtime as lt

FOLDER: Final = Path(__file__).resolve().parent
GUIDES: Final = {
    "training": "models and training steps: freezing, averages, losses, the optimizer's options",
    "models": "models of blocks: residual nets, towers, tied weights, blocks and loops of your own",
    "own-loops": "loops and losses of your own: layers, streams, buffers, graphs, raw addresses, cuBLASLt itself",
    "pytorch": "layers, norms and functions with autograd for PyTorch models",
    "distributed": "several processes: launchers, batches, checkpoints, the optimizer's state divided, failures",
    "weights": "weights from and for PyTorch, model files, checkpoints, files of any models and optimizers",
    "tuning": "what is measured when, the command line for it, where results are kept, which files are trusted",
    "fp8": "8-bit matrix products: types, scales, what the tensor cores take",
    "profiling": "where the time of a step goes",
    "rounding": "which results are rounded when",
}
"""The topics of the pages in this folder."""

TOPICS: Final = {
    "Layers and products": "linear_fwd linear_bwd linear LinearContext matmul add dropout cast_fp8 cast_fp8_rows "
    "FP8 FP8State gated_fwd gated_bwd GatedContext layer_norm_fwd layer_norm_bwd rms_norm_fwd rms_norm_bwd NormContext "
    "bind contiguous Epilogue "
    "ACTIVATIONS Activation Philox raw cublaslt",
    "Models": "MLP Linear Chain Residual Parallel LayerNorm RMSNorm SwiGLU GEGLU ReGLU Gated Dropout Block Pass",
    "Losses": "cross_entropy mse_loss huber_loss bce_with_logits Loss",
    "Training": "TrainStep AdamW Optimizer rules Parameter EMA GradScaler Schedule schedules prefetch Prefetcher "
    "evaluate Metrics fit Epoch",
    "Several processes": "group share Group",
    "Files": "save load save_model load_model save_checkpoint load_checkpoint",
    "Tuning": "tune tuning explain",
    "Profiling": "profile range check_capture CaptureReport",
    "Errors": "errors",
}
"""Public names by topic, in the order in which the page lists them."""

CONSTANTS: Final = {"ACTIVATIONS": "The names of the activations."}
"""The lines of names that have no docstring."""

VARIABLES: Final = {
    "LT_RUNTIME_CACHE_DIR": "where compiled kernels and measured plans are kept, instead of the user's cache directory",
    "LT_RUNTIME_CUBLASLT": "the cuBLASLt library to load, instead of the installed one",
    "LT_RUNTIME_TUNE": "`first-use`: each layer and product is measured before its first run; "
    "`off`: training steps do not measure either ([tuning](tuning.md))",
    "LT_RUNTIME_RECORD": "a file for the shapes, types and options of the layers and products that a script runs, "
    "for `python -m lt_runtime warmup --recorded`",
}
"""The environment variables of the package."""


def line_of(name: str) -> str:
    """The first paragraph of a public name's docstring, on one line."""
    told = CONSTANTS.get(name) or inspect.cleandoc(getattr(lt, name).__doc__).split("\n\n")[0]
    return " ".join(told.split()).removesuffix("::").replace("|", "\\|")


def page() -> str:
    """The text of docs/README.md."""
    listed = {topic: [name for name in names.split() if hasattr(lt, name)] for topic, names in TOPICS.items()}
    others = set(lt.__all__).difference(*listed.values())
    parts = ["# Documentation", "`python docs/make.py` writes this page.", "## Guides"]
    parts.append("\n".join(f"- [{name}]({name}.md): {told}" for name, told in GUIDES.items()))
    parts += ["## Public names", "`import lt_runtime as lt`; `help(lt.NAME)` has shapes, types, units and errors."]
    for topic, names in {**listed, "Others": sorted(others)}.items():
        if names:
            rows = "\n".join(f"| `lt.{name}` | {line_of(name)} |" for name in names)
            parts += [f"### {topic}", f"| Name | |\n| --- | --- |\n{rows}"]
    rows = "\n".join(f"| `{name}` | {told} |" for name, told in VARIABLES.items())
    parts += ["## Environment variables", f"| Variable | Meaning |\n| --- | --- |\n{rows}"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
