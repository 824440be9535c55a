"""Picture of a run, drawn from its log."""
