"""The pictures of the pages of prose."""
