"""`slivertune compare`: several methods or settings on the same task, with an equal budget."""
