#include <stdexcept>

#include "host/network/proxy/libfabric.h"

namespace deep_ep::host::proxy {
namespace {

constexpr const char* kRefusal =
    "fabric \"proxy\": this build has no libfabric, since its headers were missing: expected the package "
    "libfabric-dev (Debian, Ubuntu) or libfabric-devel (Fedora), then a reinstallation of the library";

}  // namespace

std::unique_ptr<Transport> make_libfabric(const NetworkPlace&) { throw std::invalid_argument(kRefusal); }

LibfabricHere libfabric_here() { return {{}, kRefusal, {}}; }

std::string libfabric_refusal(const std::string&, const std::string&) { return kRefusal; }

}  // namespace deep_ep::host::proxy
