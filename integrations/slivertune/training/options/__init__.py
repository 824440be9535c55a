"""What `slivertune train` is asked: one file for each part of the command line, and what does not go together."""
