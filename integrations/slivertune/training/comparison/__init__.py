"""`slivertune compare`: the same task by several methods or settings, at an equal budget."""
