"""How the processes of a Buffer find, authenticate and talk to each other."""
