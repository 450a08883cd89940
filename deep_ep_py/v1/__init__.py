"""What callers of DeepEP's V1 expect of a Buffer besides its modes."""
