"""Chapter 9, Muon over tensor parallelism: what no other chapter needs."""
