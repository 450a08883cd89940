// The variables of modules, found as the driver finds them: through the symbols of the image, an ELF file.
#pragma once

#include "host/cuda/driver_types.h"

namespace driver_double {

// Reads the image, which need not outlive the call. One that ends after an ELF file's magic bytes has no variables.
void remember_globals(deep_ep::host::cuda::Module module, const void* image);
void forget_globals(deep_ep::host::cuda::Module module);

}  // namespace driver_double
