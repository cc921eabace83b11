"""Chapter 2, Newton–Schulz: what no other chapter needs."""
