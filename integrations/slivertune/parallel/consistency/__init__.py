"""Whether all ranks train the same: compared before training and between steps, looked up when a collective fails."""
