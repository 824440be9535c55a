"""The processes of a run: rendezvous, decisions by the first process, and error reports."""
