"""Chapter 5, processes and collectives: what no other chapter needs."""
