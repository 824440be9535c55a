"""The `train` command: from a dataset and a model to a fine-tuned checkpoint."""
