"""Tests of the `train` command."""
