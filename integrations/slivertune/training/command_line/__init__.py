"""Command lines of `slivertune train` and `slivertune plan`, read into the settings of a run or of a plan."""
