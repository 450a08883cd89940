"""The commands of `python -m deep_ep_py`, and what they measure and show."""
