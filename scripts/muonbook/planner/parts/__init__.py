"""What the ranks hold, send and wait for, of parameters that are sharded in one way."""
