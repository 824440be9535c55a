"""What every method and layout builds on: layers, the ledger, files that are whole or absent, saved states."""
