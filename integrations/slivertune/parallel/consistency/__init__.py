"""Comparison of the ranks before training and between steps, and explanation of failed collectives."""
