"""Raises an ImportError that says why this name is absent."""

from deep_ep_py.absent import refusal

raise refusal(__name__)
