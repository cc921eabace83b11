"""Chapter 6, ZeRO-1: what no other chapter needs."""
