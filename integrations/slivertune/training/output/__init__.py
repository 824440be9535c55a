"""What a run shows, and what it leaves behind."""
