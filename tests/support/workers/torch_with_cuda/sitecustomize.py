"""On the path of a process whose torch must seem to have CUDA: asked for a GPU it initializes the driver, as such a
torch does, and ends the process.
"""

from __future__ import annotations

import ctypes
import os
from typing import NoReturn

import torch


def is_available() -> NoReturn:
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    os._exit(0)


torch.cuda.is_available = is_available
