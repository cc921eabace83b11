"""Chapter 7, the virtual map: what no other chapter needs."""
