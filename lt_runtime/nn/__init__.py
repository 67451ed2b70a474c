"""Models: blocks (layers and containers) that call the operations, and `MLP`."""
