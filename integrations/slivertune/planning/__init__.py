"""What a run will need, before it runs: a real step on tensors without data, every living byte counted."""
