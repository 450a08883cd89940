// The GPU implementation of device.h, for sm_80 and later. It includes no CUDA headers: NVRTC has the built-in
// variables, the warp intrinsics and the vector types without a header; the rest is PTX.
#pragma once

#include "device/cuda/qualifiers.h"

#include "device/cuda/copy.h"
#include "device/cuda/fp8_cast.h"
#include "device/cuda/logfmt.h"
#include "device/cuda/memory.h"
#include "device/cuda/shared.h"
#include "device/cuda/wait.h"
#include "device/cuda/warp.h"

// Set by the code that compiles a kernel and also allocates its shared memory.
#if DEEP_EP_COPY_PIECE
#include "device/cuda/row_copies_bulk.h"
#include "device/cuda/row_sums_bulk.h"
#else
#include "device/cuda/row_copies_vector.h"
#include "device/cuda/row_sums_vector.h"
#endif
