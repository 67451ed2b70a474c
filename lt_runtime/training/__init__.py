"""Training steps, prefetching of batches, and averages over steps, composed from the operations."""
