"""Models and training steps composed from the operations."""
