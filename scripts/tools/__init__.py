"""What keeps the book: measure, run the chapters, draw pages, read traces. `python scripts/tools` lists them."""
