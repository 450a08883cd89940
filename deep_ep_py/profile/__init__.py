"""What kernels execute on a GPU, counted without one: the PTX that NVRTC makes of them is interpreted on a CPU."""

from deep_ep_py.profile.device import PtxDevice, interpreting
from deep_ep_py.profile.report import KernelProfile, profiles
from deep_ep_py.profile.workload import Workload, run

__all__ = ["KernelProfile", "PtxDevice", "Workload", "interpreting", "profiles", "run"]
