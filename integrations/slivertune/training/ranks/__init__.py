"""The processes of a run: how they find each other, and who decides and reports for all."""
