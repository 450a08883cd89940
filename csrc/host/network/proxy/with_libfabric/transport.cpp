#include "host/network/proxy/libfabric.h"

#include <rdma/fi_errno.h>

#include <map>
#include <stdexcept>

#include "host/network/proxy/with_libfabric/endpoint.h"

namespace deep_ep::host::proxy {
namespace {

constexpr size_t kInFlight = 4096;    // messages that are posted but not complete
constexpr size_t kEventsAtOnce = 64;  // per read of the completion queue

class Libfabric final : public Transport {
  public:
    explicit Libfabric(const NetworkPlace& place) : slots_(kInFlight), endpoint_(place, 2 * kInFlight) {
        for (u32 i = 0; i < kInFlight; ++i) free_.push_back(i);
    }

    std::string name() const override { return endpoint_.name(); }
    u64 max_bytes() const override { return endpoint_.max_bytes(); }
    int look_up_peers() override { return endpoint_.look_up_all(); }
    bool takes(u32 peer) const override {
        return !free_.empty() && (endpoint_.peer(peer).known || endpoint_.is_published(peer));
    }
    // Nothing but a poll shows whether messages have arrived.
    bool has_work() const override { return true; }

    bool post(const Message& message) override {
        if (free_.empty() || !endpoint_.knows(message.peer)) return false;
        const LibfabricEndpoint::Peer& peer = endpoint_.peer(message.peer);
        Slot& slot = slots_[free_.back()];
        slot.context = message.context;
        if (peer.address == FI_ADDR_UNSPEC) {
            free_.pop_back();
            failed(slot, FI_EADDRNOTAVAIL, "it has " + peer.provider);
            return true;
        }
        const LibfabricEndpoint::Write write(endpoint_, message.peer, message.source, message.target, message.bytes,
                                             message.immediate, &slot.provider);
        const ssize_t result = write.post();
        if (result == -FI_EAGAIN) return false;
        free_.pop_back();
        if (result != 0) failed(slot, static_cast<u32>(-result), "");
        return true;
    }

    bool poll(Events& events) override {
        fi_cq_data_entry entries[kEventsAtOnce];
        const ssize_t count = fi_cq_read(endpoint_.queue(), entries, kEventsAtOnce);
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
        fi_context2 provider;  // for the provider's use
        u64 context;
    };

    // Found by address, since not all providers distinguish own requests from incoming messages by flags.
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
        if (fi_cq_readerr(endpoint_.queue(), &error, 0) != 1) return;
        const char* const text = fi_cq_strerror(endpoint_.queue(), error.prov_errno, error.err_data, nullptr, 0);
        if (Slot* const slot = slot_at(error.op_context)) {
            failed(*slot, static_cast<u32>(error.err), text != nullptr ? text : "");
        } else if (error.err == FI_EOVERRUN) {
            throw std::runtime_error(name() + ": more messages have arrived than its completion queue holds");
        }
        // Otherwise it concerns a message that could not be received, and its sender is notified.
    }

    std::vector<Slot> slots_;  // before the endpoint, which may use them until it is destroyed
    LibfabricEndpoint endpoint_;
    std::vector<u32> free_;  // slots
    std::vector<Completion> failed_;
    std::map<u32, std::string> texts_;  // the provider's texts, by error
};

}  // namespace

std::unique_ptr<Transport> make_libfabric(const NetworkPlace& place) { return std::make_unique<Libfabric>(place); }

}  // namespace deep_ep::host::proxy
