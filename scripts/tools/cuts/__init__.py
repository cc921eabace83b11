"""The pictures of the page on seven ways to cut."""
