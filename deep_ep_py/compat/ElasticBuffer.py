"""Raises: `from deep_ep import ElasticBuffer` tries to import this where the package has no attribute of that name."""

from .v2 import refuse

raise refuse("ElasticBuffer")
