"""Chapter 1, why orthogonalize: what no other chapter needs."""
