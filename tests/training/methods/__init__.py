"""Tests of the `train` verb."""
