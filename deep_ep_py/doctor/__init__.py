"""What this machine can do for a Buffer, and why not more: `python -m deep_ep_py doctor`.

Readers take a folder in which they find /proc, /sys and /dev, and judge nothing; what is judged is a list of findings,
each with a verdict, a reason and what to do about it.
"""
