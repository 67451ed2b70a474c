"""Devices, streams, memory, and our own kernels: compiled by NVRTC at first use, launched through the driver."""
