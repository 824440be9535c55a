"""A run as a picture, drawn from its log."""
