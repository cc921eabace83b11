"""Chapter 8, Muon over data parallelism: what no other chapter needs."""
