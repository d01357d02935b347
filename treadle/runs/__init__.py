"""The run directory: the whole truth of a run, readable without this program."""
