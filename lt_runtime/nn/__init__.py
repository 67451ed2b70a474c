"""Models: blocks over the operations, and `MLP`."""
