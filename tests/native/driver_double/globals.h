// The variables of modules, found as the driver finds them: by the symbols of the image, an ELF file.
#pragma once

#include "host/cuda/driver_types.h"

namespace driver_double {

// Reads what the image says; the image need not stay. One that is no more than an ELF file's first bytes has none.
void remember_globals(deep_ep::host::cuda::Module module, const void* image);
void forget_globals(deep_ep::host::cuda::Module module);

}  // namespace driver_double
