"""Weights and outputs that PyTorch has made, in a file: `python -m tests.support.torch_weights` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

FILE = Path(__file__).parents[1] / "programs" / "pytorch.safetensors"
"""Safetensors file: for each type the state of nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)), inputs and
outputs.
"""
_DTYPES = ("float32", "float16", "bfloat16")


def weights_of(dtype: str) -> tuple[dict[str, Any], Any, Any]:
    """Reads the state, inputs and outputs of one type, as NumPy arrays."""
    mine = {name.removeprefix(f"{dtype}/"): array for name, array in load_file(FILE).items() if name.startswith(dtype)}
    return {name: mine[name] for name in mine if name not in ("x", "y")}, mine["x"], mine["y"]


def main() -> None:
    """Writes the file."""
    import ml_dtypes
    import numpy as np
    import torch

    torch.manual_seed(0)
    arrays = {}
    for dtype in _DTYPES:
        kind = getattr(torch, dtype)
        module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 3)).to(kind)
        x = torch.randn(8, 6).to(kind)
        for name, tensor in {**module.state_dict(), "x": x, "y": module(x).detach()}.items():
            bits = tensor.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
            arrays[f"{dtype}/{name}"] = bits.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
    save_file(arrays, FILE, {"written by": f"PyTorch {torch.__version__}"})


if __name__ == "__main__":
    main()
