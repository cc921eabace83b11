"""What a world of any size will hold, send, compute and take: planned from the layout code that training uses."""
