"""Chapter 16, beyond the blueprint: what no other chapter needs."""
