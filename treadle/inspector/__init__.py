"""Looking at run directories."""
