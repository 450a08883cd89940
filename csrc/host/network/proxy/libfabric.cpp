#if __has_include(<rdma/fabric.h>)

#include "host/network/proxy/libfabric.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <stdexcept>

#include "host/network/proxy/address_page.h"
#include "host/network/proxy/libfabric_library.h"

namespace deep_ep::host::proxy {
namespace {

// The order in which they are tried. `tcp` moves messages itself since libfabric 1.18; before, `net` does. Left out:
// `sockets` and `udp`, which starve or crash, and psm, which has no immediates.
constexpr const char* kProviders[] = {"efa", "verbs;ofi_rxm", "net", "tcp", "tcp;ofi_rxm", "shm"};
constexpr size_t kInFlight = 4096;    // messages that are posted and not complete
constexpr size_t kEventsAtOnce = 64;  // of the completion queue
constexpr u64 kMostMessage = 16ull << 20;

// Objects of libfabric end by fi_close().
template <class T>
struct Closing {
    void operator()(T* object) const { fi_close(&object->fid); }
};
template <class T>
using Owned = std::unique_ptr<T, Closing<T>>;

struct FreeInfo {
    void operator()(fi_info* info) const { LibfabricLibrary::get().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

void check(long result, const std::string& doing) {
    if (result < 0) {
        throw std::invalid_argument(doing + ": " + LibfabricLibrary::get().strerror(static_cast<int>(-result)));
    }
}

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

// What a provider offers; null: nothing that will do.
Info offer_of(const std::string& provider) {
    const LibfabricLibrary& library = LibfabricLibrary::get();
    const Info hints = hints_for(provider);
    fi_info* found = nullptr;
    if (library.getinfo(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), nullptr, nullptr, 0, hints.get(), &found) !=
        0) {
        return nullptr;
    }
    return Info(found);
}

Info best_offer(const std::string& asked) {
    std::string tried;
    for (const char* provider : kProviders) {
        if (!asked.empty() && asked != provider) continue;
        if (Info info = offer_of(provider)) return info;
        tried += std::string(tried.empty() ? "" : ", ") + provider;
    }
    if (!asked.empty() && tried.empty()) {
        std::string known;
        for (const char* provider : kProviders) known += std::string(known.empty() ? "" : ", ") + provider;
        throw std::invalid_argument("DEEP_EP_PROXY_PROVIDER='" + asked + "': expected one of " + known);
    }
    std::string offered;
    for (const std::string& provider : libfabric_providers()) offered += (offered.empty() ? "" : ", ") + provider;
    throw std::invalid_argument("fabric \"proxy\": libfabric does not offer " + tried +
                                " here (DEEP_EP_PROXY_PROVIDER): it has " +
                                (offered.empty() ? "none that will do" : offered));
}

// What a rank tells the others of its endpoint.
struct Address {
    u64 base;  // of what may be written from afar, as the provider addresses it
    u64 key;
    std::array<u8, 512> name;
    std::array<char, 64> provider;
};
static_assert(sizeof(Address) <= wire::NetworkAddress::kBytes, "a rank's address page");

class Libfabric final : public Transport {
  public:
    explicit Libfabric(const NetworkPlace& place) : place_(place), info_(best_offer(place.provider)) {
        open();
        register_memory();
        publish();
    }

    std::string name() const override { return std::string("libfabric's ") + info_->fabric_attr->prov_name; }
    u64 most_bytes() const override {
        return std::min<u64>(info_->ep_attr->max_msg_size, kMostMessage) / wire::kPieceBytes * wire::kPieceBytes;
    }
    bool takes(u32 peer) const override { return !free_.empty() && (peers_[peer].known || is_published(peer)); }
    // Messages come without a sign of their own.
    bool has_work() const override { return true; }

    bool post(const Message& message) override {
        if (free_.empty() || !knows(message.peer)) return false;
        const Peer& peer = peers_[message.peer];
        Slot& slot = slots_[free_.back()];
        slot.context = message.context;
        if (peer.address == FI_ADDR_UNSPEC) {
            free_.pop_back();
            failed(slot, FI_EADDRNOTAVAIL, "it has " + peer.provider);
            return true;
        }
        iovec from{place_.own_heap() + message.source, message.bytes};
        void* described = local_ ? fi_mr_desc(local_.get()) : nullptr;
        const fi_rma_iov to{peer.base + (message.target - place_.layout.scratch_offset()), message.bytes, peer.key};
        fi_msg_rma request{};
        request.msg_iov = &from;
        request.desc = &described;
        request.iov_count = 1;
        request.addr = peer.address;
        request.rma_iov = &to;
        request.rma_iov_count = 1;
        request.context = &slot.provider;
        request.data = message.immediate;
        // Without this flag a completion may come for what is never delivered.
        const ssize_t result =
            fi_writemsg(endpoint_.get(), &request, FI_REMOTE_CQ_DATA | FI_COMPLETION | FI_DELIVERY_COMPLETE);
        if (result == -FI_EAGAIN) return false;
        free_.pop_back();
        if (result != 0) failed(slot, static_cast<u32>(-result), "");
        return true;
    }

    bool poll(Events& events) override {
        fi_cq_data_entry entries[kEventsAtOnce];
        const ssize_t count = fi_cq_read(queue_.get(), entries, kEventsAtOnce);
        if (count == -FI_EAVAIL) {
            read_error();
        } else if (count < 0 && count != -FI_EAGAIN) {
            check(count, name() + ": reading completions");
        }
        for (ssize_t i = 0; i < count; ++i) {
            if (Slot* const slot = slot_at(entries[i].op_context)) {
                events.completions.push_back({slot->context});
                free_.push_back(static_cast<u32>(slot - slots_.data()));
            } else if ((entries[i].flags & FI_REMOTE_CQ_DATA) != 0) {
                events.arrivals.push_back(static_cast<u32>(entries[i].data));
            }
        }
        events.completions.insert(events.completions.end(), failed_.begin(), failed_.end());
        const bool worked = count > 0 || !failed_.empty();
        failed_.clear();
        return worked;
    }

    std::string text(u32 error) const override {
        const auto found = texts_.find(error);
        const std::string said = found == texts_.end() || found->second.empty() ? "" : " (" + found->second + ")";
        return LibfabricLibrary::get().strerror(static_cast<int>(error)) + said;
    }

  private:
    struct Slot {
        fi_context2 provider;  // the provider's own
        u64 context;
    };
    struct Peer {
        bool known = false;
        fi_addr_t address = FI_ADDR_UNSPEC;
        u64 base = 0, key = 0;
        std::string provider;
    };

    void open() {
        const LibfabricLibrary& library = LibfabricLibrary::get();
        fid_fabric* fabric = nullptr;
        check(library.fabric(info_->fabric_attr, &fabric, nullptr), name() + ": opening it");
        fabric_.reset(fabric);
        fid_domain* domain = nullptr;
        check(fi_domain(fabric, info_.get(), &domain, nullptr), name() + ": opening its domain");
        domain_.reset(domain);
        fi_cq_attr queue_attributes{};
        queue_attributes.format = FI_CQ_FORMAT_DATA;
        queue_attributes.size = 2 * kInFlight;
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
        slots_.resize(kInFlight);
        for (u32 i = 0; i < kInFlight; ++i) free_.push_back(i);
        peers_.resize(place_.heaps.size());
    }

    // Others may write between the signal words, which the host alone stores, and the outputs.
    void register_memory() {
        const u64 first = place_.layout.scratch_offset(), end = place_.layout.arena_offset();
        u64 key = 0;
        // Guessing it is no easier than it has to be: libfabric lets this side choose where the provider does not.
        if (getrandom(&key, sizeof(key), 0) != sizeof(key)) throw std::invalid_argument("no random numbers");
        const size_t key_bytes = info_->domain_attr->mr_key_size;
        if (key_bytes < sizeof(key)) key &= (u64{1} << 8 * key_bytes) - 1;
        written_ = registered(first, end - first, FI_REMOTE_WRITE, key);
        if ((info_->domain_attr->mr_mode & FI_MR_LOCAL) == 0) return;
        // What is sent lies there too: outputs are never sent from where they are.
        local_ = registered(first, end - first, FI_WRITE, key ^ 1);
    }
    Owned<fid_mr> registered(u64 offset, u64 bytes, u64 access, u64 key) {
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

    void publish() {
        Address own{};
        const bool by_address = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
        own.base = by_address ? reinterpret_cast<u64>(place_.own_heap() + place_.layout.scratch_offset()) : 0;
        own.key = fi_mr_key(written_.get());
        size_t length = own.name.size();
        check(fi_getname(&endpoint_->fid, own.name.data(), &length), name() + ": its address");
        std::strncpy(own.provider.data(), info_->fabric_attr->prov_name, own.provider.size() - 1);
        address_page(place_, static_cast<u32>(place_.rank)).publish(&own, sizeof(own));
    }
    bool is_published(u32 peer) const { return address_page(place_, peer).is_published(); }
    bool knows(u32 peer) {
        Peer& known = peers_[peer];
        Address theirs{};
        if (known.known || !address_page(place_, peer).read(&theirs, sizeof(theirs))) return known.known;
        // An address that is none, or of another provider: a message to it fails.
        known.provider.assign(theirs.provider.data(), strnlen(theirs.provider.data(), theirs.provider.size()));
        if (known.provider != info_->fabric_attr->prov_name ||
            fi_av_insert(vector_.get(), theirs.name.data(), 1, &known.address, 0, nullptr) != 1) {
            known.address = FI_ADDR_UNSPEC;
        }
        known.base = theirs.base;
        known.key = theirs.key;
        return known.known = true;
    }

    // By its address: flags do not tell own requests from messages with all providers.
    Slot* slot_at(void* context) {
        const auto at = reinterpret_cast<uintptr_t>(context), begin = reinterpret_cast<uintptr_t>(slots_.data());
        const bool ours = at >= begin && at < begin + slots_.size() * sizeof(Slot);
        return ours ? &slots_[(at - begin) / sizeof(Slot)] : nullptr;
    }
    void failed(Slot& slot, u32 error, const std::string& text) {
        failed_.push_back({slot.context, error});
        free_.push_back(static_cast<u32>(&slot - slots_.data()));
        texts_.emplace(error, text);
    }
    void read_error() {
        fi_cq_err_entry error{};
        if (fi_cq_readerr(queue_.get(), &error, 0) != 1) return;
        const char* const text = fi_cq_strerror(queue_.get(), error.prov_errno, error.err_data, nullptr, 0);
        if (Slot* const slot = slot_at(error.op_context)) {
            failed(*slot, static_cast<u32>(error.err), text != nullptr ? text : "");
        } else if (error.err == FI_EOVERRUN) {
            throw std::runtime_error(name() + ": more messages have come than its completion queue holds");
        }
        // Else it is of a message that could not come here, and its sender is told.
    }

    const NetworkPlace place_;
    const Info info_;
    // In the order in which they are made: they end in the other one.
    Owned<fid_fabric> fabric_;
    Owned<fid_domain> domain_;
    Owned<fid_cq> queue_;
    Owned<fid_av> vector_;
    Owned<fid_mr> written_, local_;
    std::vector<Slot> slots_;  // which an endpoint that ends may still use
    Owned<fid_ep> endpoint_;
    std::vector<u32> free_;  // slots
    std::vector<Peer> peers_;
    std::vector<Completion> failed_;
    std::map<u32, std::string> texts_;  // of errors, as the provider words them
};

}  // namespace

std::unique_ptr<Transport> make_libfabric(const NetworkPlace& place) { return std::make_unique<Libfabric>(place); }

std::vector<std::string> libfabric_providers() {
    std::vector<std::string> offered;
    try {
        for (const char* provider : kProviders) {
            if (offer_of(provider)) offered.emplace_back(provider);
        }
    } catch (const std::invalid_argument&) {  // no library, or another one
    }
    return offered;
}

}  // namespace deep_ep::host::proxy

#endif
