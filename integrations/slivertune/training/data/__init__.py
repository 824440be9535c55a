"""Loading of datasets: training and evaluation splits, and the columns to read."""
