"""State that a Buffer's calls of both modes share: memory, open operations, failures, recovery, growth."""
