"""Chapter 13, memory: what no other chapter needs."""
