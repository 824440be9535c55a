"""SFT on several ranks: what its layouts have in common."""
