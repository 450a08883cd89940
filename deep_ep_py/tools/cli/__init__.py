"""The commands of `python -m deep_ep_py` that are not the benchmark's."""
