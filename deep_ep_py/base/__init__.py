"""The foundation of the package: the extension, checked arguments, settings, events."""
