"""Raises why there is nothing of this name."""

from deep_ep_py.absent import refusal

raise refusal(__name__)
