"""Chapter 10, the whole step on a DP x TP grid: what no other chapter needs."""
