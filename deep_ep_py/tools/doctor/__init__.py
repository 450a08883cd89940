"""The report on what this machine can do for a Buffer, and what limits it: `python -m deep_ep_py doctor`.

Readers take the folder with /proc, /sys and /dev and do not judge. Judgments are lists of findings, each with a
verdict, a reason and advice.
"""
