"""SFT on several ranks: code shared by its layouts."""
