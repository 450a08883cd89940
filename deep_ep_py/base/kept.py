"""Tensors that the library keeps beyond the call that makes them."""

from __future__ import annotations

import torch

kept = torch.inference_mode(False)
"""Decorates what makes such tensors: made in inference mode, they could not be written or saved for a backward outside.
Results follow the mode of the caller instead, as those of torch do."""
