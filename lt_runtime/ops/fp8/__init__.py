"""FP8: casts, operands of products, scales of layers, the choice of FP8, layers, and gradients written in FP8."""
