"""What a machine with a GPU shall tell in a few minutes: experiments in the order of their worth, run one by one."""
