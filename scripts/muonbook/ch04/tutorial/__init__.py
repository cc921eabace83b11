"""A public tutorial's recipes, run again."""
