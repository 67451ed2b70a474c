"""GPUs through the driver: devices, streams, memory, graphs, kernels compiled by NVRTC at first use and launched."""
