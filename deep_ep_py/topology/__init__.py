"""Which ranks there are, and how they reach each other."""
