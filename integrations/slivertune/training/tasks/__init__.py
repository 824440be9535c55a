"""From rows to what the HF Trainer takes, task by task."""
