"""What the book needs beside the engine: pictures, puzzles, measurements, and a room for every chapter."""
