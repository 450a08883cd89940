"""What a Buffer's calls share, whatever their mode: memory, open operations, failures, recovery, growth."""
