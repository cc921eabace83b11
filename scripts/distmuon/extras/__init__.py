"""What goes beside any optimizer: checkpoints, metrics, QK-Clip."""
