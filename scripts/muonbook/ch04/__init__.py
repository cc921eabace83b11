"""Chapter 4, fair races between optimizers: what no other chapter needs."""
