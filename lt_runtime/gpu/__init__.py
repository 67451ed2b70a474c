"""GPUs through the CUDA driver API: devices, streams, memory, graphs, and kernels that NVRTC compiles on first use."""
