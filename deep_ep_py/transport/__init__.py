"""How ranks find and reach each other."""
