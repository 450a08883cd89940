// The CPU implementation of device.h: CUDA threads are fibers of the executor.
#pragma once

#include "sim/device/builtins.h"
#include "sim/device/memory.h"
#include "sim/device/shared.h"
#include "sim/device/wait.h"

#include "sim/device/copy.h"
#include "sim/device/fp8_cast.h"
#include "sim/device/logfmt.h"
#include "sim/device/row_copies.h"
#include "sim/device/row_sums.h"
