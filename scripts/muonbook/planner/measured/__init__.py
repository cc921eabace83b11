"""Worlds that can be started, timed step by step, and the planner's seconds held against them."""
