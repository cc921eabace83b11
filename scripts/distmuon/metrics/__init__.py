"""What to watch while an optimizer trains."""
