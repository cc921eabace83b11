"""Failure drills: what is done to a training, what is seen of it, what is lost, and how it goes on."""
