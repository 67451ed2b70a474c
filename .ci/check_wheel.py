"""Checks the lt_runtime that is installed here from a wheel, with its core dependencies only.

Takes the names of the files in `cuda_src/` that it must hold.
"""

import sys
from pathlib import Path

import numpy as np

import lt_runtime as lt

GPU_LIBRARIES = {"cuda", "cupy", "torch"}


def main(kernels: list[str]) -> None:
    """Exits with a message at the first thing that is amiss."""
    loaded = GPU_LIBRARIES & {name.partition(".")[0] for name in sys.modules}
    if loaded:
        sys.exit(f"importing lt_runtime loaded {sorted(loaded)}")
    package = Path(lt.__file__).parent
    if not package.is_relative_to(sys.prefix):
        sys.exit(f"{package} is not the installed package")
    missing = [kernel for kernel in kernels if not (package / "cuda_src" / kernel).is_file()]
    if missing or not kernels:
        sys.exit(f"kernels missing from the wheel: {missing or 'all'}")
    ones = np.ones((2, 3), np.float32)
    y, _ = lt.linear_fwd(ones, ones, None, activation="relu")
    if not np.array_equal(y, np.full((2, 2), 3.0)):
        sys.exit(f"linear_fwd on NumPy arrays gave {y}")
    print(f"{package}: {len(kernels)} kernel files, runs on NumPy arrays")


if __name__ == "__main__":
    main(sys.argv[1:])
