"""Chapter 0: the whole machine on one page."""
