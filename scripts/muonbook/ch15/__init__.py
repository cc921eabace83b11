"""Chapter 15, regimes: what no other chapter needs."""
