"""Normal mode: ranks exchange counts first, then rows go straight to their final places."""
