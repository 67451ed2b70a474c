"""Reads operands in place: address, shape, strides, type, device, and the library that an array comes from."""
