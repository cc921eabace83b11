"""Chapter 11, the bug museum: what no other chapter needs."""
