"""The embedded default: a model and text that every machine has."""
