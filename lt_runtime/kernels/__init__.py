"""Our kernels: a module for each family of `.cu` files, which alone launches it."""
