// libfabric's functions, opened at run time; everything else in its headers is inline. Only for sources that are
// compiled with libfabric's headers.
#pragma once

#include <rdma/fabric.h>

#include <string>

namespace deep_ep::host::proxy {

std::string version_text(uint32_t version);

struct LibfabricLibrary {
    decltype(&::fi_getinfo) getinfo;
    decltype(&::fi_freeinfo) freeinfo;
    decltype(&::fi_dupinfo) dupinfo;
    decltype(&::fi_fabric) fabric;
    decltype(&::fi_strerror) strerror;
    decltype(&::fi_version) version;

    // Throws std::invalid_argument if there is no library, or none that matches these headers.
    static const LibfabricLibrary& get();

  private:
    LibfabricLibrary();
};

}  // namespace deep_ep::host::proxy
