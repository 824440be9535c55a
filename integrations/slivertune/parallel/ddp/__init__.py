"""Ranks that each hold the whole model (DDP)."""
