"""How anyone certifies a run: certificates, predictions, and counts that do not trust the ledger."""
