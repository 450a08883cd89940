"""The ranks of a Buffer, and how they reach each other."""
