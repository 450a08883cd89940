"""Stand-in for `deep_ep.utils.event`."""

from deep_ep_py import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
