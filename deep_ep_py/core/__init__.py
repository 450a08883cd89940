"""What everything else stands on: the extension, checked arguments, settings, events."""
