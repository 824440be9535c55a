"""The options of `slivertune train`: their tables, parsing, rules and help."""
