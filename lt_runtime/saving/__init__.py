"""Saves models, checkpoints and whole training runs in safetensors files, and loads them."""
