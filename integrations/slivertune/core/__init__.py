"""Shared foundation of all methods and layouts: layers, the ledger, atomic files, saved states."""
