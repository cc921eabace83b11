"""Distributed Muon: the code that the book "Muon at Scale" teaches. Every module's first line says what it is for."""
