"""Plans for more ranks than anybody has: all divisions of a world, and the quickest in pictures."""
