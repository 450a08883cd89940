"""Examples: `python -m deep_ep_py.examples.moe_demo`."""
