"""Plans of one matrix product: by cuBLASLt on the operands or on padded copies, or by our kernels."""
