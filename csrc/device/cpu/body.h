// The CPU implementation of device.h: CUDA threads are fibers of the executor.
#pragma once

#include "device/cpu/builtins.h"
#include "device/cpu/memory.h"
#include "device/cpu/shared.h"
#include "device/cpu/wait.h"

#include "device/cpu/cast.h"
#include "device/cpu/copy.h"
#include "device/cpu/logfmt.h"
#include "device/cpu/row_copies.h"
#include "device/cpu/row_sums.h"
