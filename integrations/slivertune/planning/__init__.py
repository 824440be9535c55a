"""Plans of a run's memory and time before it starts: a real step on fake tensors, with every allocated byte counted."""
