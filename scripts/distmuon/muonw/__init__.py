"""MuonW: Muon for hidden matrices, AdamW for the rest, on plain tensors and on the DTensors of FSDP2 and TP."""
