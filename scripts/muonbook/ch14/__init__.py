"""Chapter 14, traces: what no other chapter needs."""
