#include "host/network/proxy/with_libfabric/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

namespace deep_ep::host::proxy {
namespace {

constexpr const char* kLibrary = "libfabric.so.1";

// The symbol versions whose structures match these headers: the newest ones in a library may have others.
struct Symbol {
    const char* name;
    const char* version;
};
#if FI_MAJOR_VERSION == 1 && FI_MINOR_VERSION >= 5 && FI_MINOR_VERSION < 20
constexpr const char *kInfo = "FABRIC_1.3", *kFabric = "FABRIC_1.1", *kOld = "FABRIC_1.0";
constexpr bool kOnlyThisVersion = false;
#else
constexpr const char *kInfo = nullptr, *kFabric = nullptr, *kOld = nullptr;
constexpr bool kOnlyThisVersion = true;
#endif

template <class F>
void find(void* library, const Symbol& symbol, F& function) {
    void* const found =
        symbol.version != nullptr ? dlvsym(library, symbol.name, symbol.version) : dlsym(library, symbol.name);
    if (found == nullptr) throw std::invalid_argument(std::string(kLibrary) + " has no " + symbol.name);
    function = reinterpret_cast<F>(found);
}

}  // namespace

std::string version_text(uint32_t version) {
    return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

LibfabricLibrary::LibfabricLibrary() {
    // Copies between processes by the kernel's cross-memory attach occasionally hang in versions of this provider up to
    // 1.17.
    setenv("FI_SHM_DISABLE_CMA", "1", 0);
    // A PSM library that a provider depends on would take over the process's signals, including SIGTERM, and write a
    // backtrace of any crash into the caller's working directory.
    setenv("IPATH_NO_BACKTRACE", "1", 0);
    setenv("HFI_NO_BACKTRACE", "1", 0);
    // Keeps forked children away from registered memory.
    setenv("RDMAV_FORK_SAFE", "1", 0);
    setenv("FI_EFA_FORK_SAFE", "1", 0);
    // Never closed: providers may have threads of their own.
    void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::invalid_argument(std::string("fabric \"proxy\": libfabric cannot be opened (") + dlerror() +
                                    "): expected the package libfabric1 (Debian, Ubuntu) or libfabric (Fedora)");
    }
    find(library, {"fi_getinfo", kInfo}, getinfo);
    find(library, {"fi_freeinfo", kInfo}, freeinfo);
    find(library, {"fi_dupinfo", kInfo}, dupinfo);
    find(library, {"fi_fabric", kFabric}, fabric);
    find(library, {"fi_strerror", kOld}, strerror);
    find(library, {"fi_version", kOld}, version);
    const uint32_t built = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), here = version();
    if (here < built || (kOnlyThisVersion && here != built)) {
        throw std::invalid_argument("fabric \"proxy\": libfabric " + version_text(here) +
                                    " is installed, but this was built for " + version_text(built) +
                                    ": reinstall the library on a machine that has that version");
    }
}

const LibfabricLibrary& LibfabricLibrary::get() {
    static const LibfabricLibrary library;  // retried by the next call if the constructor throws
    return library;
}

}  // namespace deep_ep::host::proxy
