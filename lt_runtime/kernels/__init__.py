"""The package's CUDA kernels: each module prepares and launches the kernels of one family of `.cu` files."""
