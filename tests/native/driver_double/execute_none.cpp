// Kernels end at once and do nothing.
#include "execute.h"

namespace driver_double {

uint64_t run(const std::string&, const deep_ep::host::cuda::LaunchConfig&, int, const void*) { return 0; }
bool ended(uint64_t) { return true; }
size_t argument_bytes(const std::string&) { return 0; }
void share(const void*, size_t) {}
void unshare(const void*) {}

}  // namespace driver_double
