"""Chapter 16: beyond the blueprint. The step of one owner per matrix, and everybody's race against its floor."""
