"""Worlds planned side by side: which division of the ranks, and which algorithm."""
