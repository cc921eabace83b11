"""Where everything lives and travels: the virtual map, the grid, its collectives, and the ledger that counts them."""
