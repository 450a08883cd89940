"""Raises: `from deep_ep import EPHandle` tries to import this where the package has no attribute of that name."""

from .v2 import refuse

raise refuse("EPHandle")
