"""The optimizers: Newton–Schulz, Muon on one device, and Muon over ZeRO-1 shards on a DP x TP grid."""
