"""Preparation of datasets for the HF Trainer, task by task."""
