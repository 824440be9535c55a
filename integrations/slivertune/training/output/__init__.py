"""Output of a run: lines on the screen, and files in its folder."""
