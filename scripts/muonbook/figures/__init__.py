"""What several chapters draw."""
