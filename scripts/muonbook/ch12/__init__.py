"""Chapter 12, bytes: what no other chapter needs."""
