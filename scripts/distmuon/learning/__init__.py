"""Chapter 4: fair races between optimizers."""
