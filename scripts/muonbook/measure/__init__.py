"""What several chapters measure: the ways to train that are compared, their workload, traces, results."""
