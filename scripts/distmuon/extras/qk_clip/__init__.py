"""QK-Clip: the clip of MuonClip, which bounds attention's logits by scaling the weights of query and key."""
