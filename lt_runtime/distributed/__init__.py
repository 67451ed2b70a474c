"""Processes that train one model together: their groups, and the reduction of gradients over NCCL or MPI."""
