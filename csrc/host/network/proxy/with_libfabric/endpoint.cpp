#include "host/network/proxy/with_libfabric/endpoint.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "host/network/proxy/address_page.h"
#include "host/network/proxy/libfabric.h"

namespace deep_ep::host::proxy {
namespace {

// In the order in which they are tried. `tcp` moves messages itself since libfabric 1.18; before that, `net` does.
// Left out: `sockets` and `udp`, which starve or crash, and psm, which has no immediates.
constexpr const char* kProviders[] = {"efa", "verbs;ofi_rxm", "net", "tcp", "tcp;ofi_rxm", "shm"};
constexpr u64 kMaxMessage = 16ull << 20;

// Providers whose endpoints have an IP address, and the one that reaches only its own machine.
constexpr std::string_view kByAddress[] = {"net", "tcp", "tcp;ofi_rxm"}, kNear = "shm";

Info hints_for(const std::string& provider) {
    Info hints(LibfabricLibrary::get().dupinfo(nullptr));
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->cq_data_size = sizeof(u32);
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->fabric_attr->prov_name = strdup(provider.c_str());  // freed with the hints
    return hints;
}

// Returns what a provider offers, or null if nothing is suitable. `address`: that of this machine, if other machines
// must reach it.
Info offer_of(const std::string& provider, const std::string& address) {
    const LibfabricLibrary& library = LibfabricLibrary::get();
    const Info hints = hints_for(provider);
    if (!address.empty() && provider == kNear) return nullptr;
    const bool at =
        !address.empty() && std::find(std::begin(kByAddress), std::end(kByAddress), provider) != std::end(kByAddress);
    fi_info* found = nullptr;
    const int result = library.getinfo(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), at ? address.c_str() : nullptr,
                                       nullptr, at ? FI_SOURCE | FI_NUMERICHOST : 0, hints.get(), &found);
    return result == 0 ? Info(found) : nullptr;
}

std::string offered_at(const std::string& address) {
    std::string offered;
    for (const char* provider : kProviders) {
        if (offer_of(provider, address)) offered += (offered.empty() ? "" : ", ") + std::string(provider);
    }
    return offered;
}

Info best_offer(const std::string& asked, const std::string& address) {
    std::string tried;
    for (const char* provider : kProviders) {
        if (!asked.empty() && asked != provider) continue;
        if (Info info = offer_of(provider, address)) return info;
        tried += std::string(tried.empty() ? "" : ", ") + provider;
    }
    if (!asked.empty() && tried.empty()) {
        std::string known;
        for (const char* provider : kProviders) known += std::string(known.empty() ? "" : ", ") + provider;
        throw std::invalid_argument("DEEP_EP_PROXY_PROVIDER='" + asked + "': expected one of " + known);
    }
    const std::string offered = offered_at(address);
    throw std::invalid_argument("fabric \"proxy\": libfabric does not offer " + tried + " " +
                                (address.empty() ? "here" : "to other machines, at " + address) +
                                " (DEEP_EP_PROXY_PROVIDER): it has " +
                                (offered.empty() ? "none that is suitable" : offered));
}

// The endpoint data that a rank publishes to the others.
struct Address {
    u64 base;  // of the remotely writable memory, as the provider addresses it
    u64 key;
    std::array<u8, 512> name;
    std::array<char, 64> provider;
};
static_assert(sizeof(Address) <= wire::NetworkAddress::kBytes, "a rank's address page");

}  // namespace

void check(long result, const std::string& doing) {
    if (result < 0) {
        throw std::invalid_argument(doing + ": " + LibfabricLibrary::get().strerror(static_cast<int>(-result)));
    }
}

LibfabricEndpoint::LibfabricEndpoint(const NetworkPlace& place, size_t events)
    : place_(place), info_(best_offer(place.provider, place.address)), peers_(place.heaps.size()) {
    open(events);
    register_memory();
    publish();
}

u64 LibfabricEndpoint::max_bytes() const {
    return std::min<u64>(info_->ep_attr->max_msg_size, kMaxMessage) / wire::kPieceBytes * wire::kPieceBytes;
}

void LibfabricEndpoint::open(size_t events) {
    const LibfabricLibrary& library = LibfabricLibrary::get();
    fid_fabric* fabric = nullptr;
    check(library.fabric(info_->fabric_attr, &fabric, nullptr), name() + ": opening it");
    fabric_.reset(fabric);
    fid_domain* domain = nullptr;
    check(fi_domain(fabric, info_.get(), &domain, nullptr), name() + ": opening its domain");
    domain_.reset(domain);
    fi_cq_attr queue_attributes{};
    queue_attributes.format = FI_CQ_FORMAT_DATA;
    queue_attributes.size = events;
    queue_attributes.wait_obj = FI_WAIT_NONE;
    fid_cq* queue = nullptr;
    check(fi_cq_open(domain, &queue_attributes, &queue, nullptr), name() + ": making a completion queue");
    queue_.reset(queue);
    fi_av_attr vector_attributes{};
    vector_attributes.type = FI_AV_TABLE;
    fid_av* vector = nullptr;
    check(fi_av_open(domain, &vector_attributes, &vector, nullptr), name() + ": making an address vector");
    vector_.reset(vector);
    fid_ep* endpoint = nullptr;
    check(fi_endpoint(domain, info_.get(), &endpoint, nullptr), name() + ": making an endpoint");
    endpoint_.reset(endpoint);
    check(fi_ep_bind(endpoint, &vector->fid, 0), name() + ": binding its address vector");
    check(fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV), name() + ": binding its completion queue");
    check(fi_enable(endpoint), name() + ": enabling its endpoint");
}

// Peers may write to the part between the signal words, which only the host stores, and the outputs.
void LibfabricEndpoint::register_memory() {
    const u64 first = place_.layout.scratch_offset(), end = place_.layout.arena_offset();
    u64 key = 0;
    // Random, so that the key is hard to guess: libfabric lets this side choose it unless the provider does.
    if (getrandom(&key, sizeof(key), 0) != sizeof(key)) throw std::invalid_argument("getrandom: no random numbers");
    const size_t key_bytes = info_->domain_attr->mr_key_size;
    if (key_bytes < sizeof(key)) key &= (u64{1} << 8 * key_bytes) - 1;
    written_ = registered(first, end - first, FI_REMOTE_WRITE, key);
    if ((info_->domain_attr->mr_mode & FI_MR_LOCAL) == 0) return;
    // Sources of sends are in the same part: outputs are never sent from where they are.
    local_ = registered(first, end - first, FI_WRITE, key ^ 1);
}

Owned<fid_mr> LibfabricEndpoint::registered(u64 offset, u64 bytes, u64 access, u64 key) {
    fid_mr* region = nullptr;
    check(fi_mr_reg(domain_.get(), place_.own_heap() + offset, bytes, access, 0, key, 0, &region, nullptr),
          name() + ": registering " + std::to_string(bytes) + " bytes");
    Owned<fid_mr> owned(region);
    if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
        check(fi_mr_bind(region, &endpoint_->fid, 0), name() + ": binding memory");
        check(fi_mr_enable(region), name() + ": enabling memory");
    }
    return owned;
}

void LibfabricEndpoint::publish() {
    Address own{};
    const bool by_address = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    own.base = by_address ? reinterpret_cast<u64>(place_.own_heap() + place_.layout.scratch_offset()) : 0;
    own.key = fi_mr_key(written_.get());
    size_t length = own.name.size();
    check(fi_getname(&endpoint_->fid, own.name.data(), &length), name() + ": its address");
    std::strncpy(own.provider.data(), info_->fabric_attr->prov_name, own.provider.size() - 1);
    address_page(place_, static_cast<u32>(place_.rank)).publish(&own, sizeof(own));
}

bool LibfabricEndpoint::is_published(u32 peer) const { return address_page(place_, peer).is_published(); }

bool LibfabricEndpoint::knows(u32 peer) {
    Peer& known = peers_[peer];
    Address theirs{};
    if (known.known || !address_page(place_, peer).read(&theirs, sizeof(theirs))) return known.known;
    // Messages to an invalid address, or to that of another provider, fail.
    known.provider.assign(theirs.provider.data(), strnlen(theirs.provider.data(), theirs.provider.size()));
    if (known.provider != info_->fabric_attr->prov_name ||
        fi_av_insert(vector_.get(), theirs.name.data(), 1, &known.address, 0, nullptr) != 1) {
        known.address = FI_ADDR_UNSPEC;
    }
    known.base = theirs.base;
    known.key = theirs.key;
    return known.known = true;
}

int LibfabricEndpoint::look_up_all() {
    int missing = -1;
    for (u32 peer = 0; peer < peers_.size(); ++peer) {
        if (place_.reached[peer] && !place_.is_gone(peer) && !knows(peer)) missing = static_cast<int>(peer);
    }
    return missing;
}

LibfabricEndpoint::Write::Write(const LibfabricEndpoint& from, u32 peer, u64 source, u64 target, u64 bytes,
                                u32 immediate, void* context)
    : endpoint_(from.endpoint_.get()),
      from_{from.place_.own_heap() + source, bytes},
      described_(from.local_ ? fi_mr_desc(from.local_.get()) : nullptr),
      to_{from.peers_[peer].base + (target - from.place_.layout.scratch_offset()), bytes, from.peers_[peer].key} {
    request_.msg_iov = &from_;
    request_.desc = &described_;
    request_.iov_count = 1;
    request_.addr = from.peers_[peer].address;
    request_.rma_iov = &to_;
    request_.rma_iov_count = 1;
    request_.context = context;
    request_.data = immediate;
}

LibfabricHere libfabric_here() {
    LibfabricHere here;
    try {
        here.version = version_text(LibfabricLibrary::get().version());
    } catch (const std::invalid_argument& error) {  // no library, or one of another version
        here.refusal = error.what();
        return here;
    }
    for (const char* provider : kProviders) {
        if (const Info info = offer_of(provider, "")) {
            here.providers.push_back({provider, version_text(info->fabric_attr->prov_version)});
        }
    }
    return here;
}

std::string libfabric_refusal(const std::string& provider, const std::string& address) try {
    best_offer(provider, address);
    return {};
} catch (const std::invalid_argument& error) {
    return error.what();
}

}  // namespace deep_ep::host::proxy
