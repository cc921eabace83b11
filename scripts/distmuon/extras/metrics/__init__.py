"""What to watch while an optimizer trains: the same numbers on one process and on any grid, written while it runs."""
