#include "host/network/proxy/libfabric.h"
#include "host/network/proxy/measure/puts.h"

namespace deep_ep::host::proxy {

std::unique_ptr<Puts> make_raw_puts(const NetworkPlace& place) {
    make_libfabric(place);  // says what is missing
    return nullptr;
}

}  // namespace deep_ep::host::proxy
