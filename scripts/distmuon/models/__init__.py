"""What is trained: small networks that can be cut over TP, their data, and the recipe of a run."""
