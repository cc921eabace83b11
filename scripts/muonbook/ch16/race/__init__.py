"""Everybody's step beside its floor: what make bench NAMES=step measures."""
