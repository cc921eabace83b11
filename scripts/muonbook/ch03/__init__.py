"""Chapter 3, Muon on one device: what no other chapter needs."""
