"""Worlds that no laptop starts: planned, surveyed, drawn."""
