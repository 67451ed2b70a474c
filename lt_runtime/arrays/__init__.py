"""Operands read where they lie: address, shape, strides, type, device, and the library they came from."""
