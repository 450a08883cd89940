"""How the processes of a Buffer find each other, know each other, and talk."""
