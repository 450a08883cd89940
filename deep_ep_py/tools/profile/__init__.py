"""Instruction counts of GPU kernels without a GPU: the PTX that NVRTC generates is interpreted on a CPU."""

from deep_ep_py.tools.profile.device import PtxDevice, interpreting
from deep_ep_py.tools.profile.report import KernelProfile, profiles
from deep_ep_py.tools.profile.workload import Workload, run

__all__ = ["KernelProfile", "PtxDevice", "Workload", "interpreting", "profiles", "run"]
