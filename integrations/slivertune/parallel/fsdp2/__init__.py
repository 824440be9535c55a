"""Ranks that shard the weights by rows (FSDP2, `fully_shard`)."""
