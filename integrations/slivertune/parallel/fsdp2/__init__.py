"""Ranks that share the weights out by rows (FSDP2, `fully_shard`)."""
