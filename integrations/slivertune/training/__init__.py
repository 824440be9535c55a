"""The `train` verb: from a dataset and a model to a fine-tuned checkpoint."""
