"""Chapter 17, MuonW in the program that its reader already has: what no other chapter needs."""
