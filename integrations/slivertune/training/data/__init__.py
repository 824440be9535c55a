"""From the name of a dataset to a training and an evaluation split, with the columns that are read."""
