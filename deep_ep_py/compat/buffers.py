"""Stand-in for `deep_ep.buffers`, where DeepEP 2 keeps the Buffers of both interfaces."""

from . import buffer as legacy
from . import elastic
from .buffer import Buffer
from .elastic import ElasticBuffer, EPHandle

__all__ = ["Buffer", "EPHandle", "ElasticBuffer", "elastic", "legacy"]
