// Kernels end at once and do nothing.
#include "execute.h"

namespace driver_double {

uint64_t run(const std::string&, const deep_ep::host::cuda::LaunchConfig&, const void*) { return 0; }
bool ended(uint64_t) { return true; }
std::string copy_of_args(const std::string&, const void*) { return {}; }
void share(const void*, size_t) {}
void unshare(const void*) {}

}  // namespace driver_double
