"""Embedded default: a model and a text that every machine has."""
