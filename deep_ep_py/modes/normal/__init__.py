"""Normal mode: counts first, then rows straight to their places."""
