"""Tests of `slivertune compare`."""
