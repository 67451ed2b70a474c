"""Models and runs in safetensors files."""
