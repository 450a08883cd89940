#include "host/network/proxy/measure/puts.h"

#include <rdma/fi_errno.h>

#include <array>
#include <stdexcept>

#include "host/network/proxy/with_libfabric/endpoint.h"

namespace deep_ep::host::proxy {
namespace {

// The minimum that moves puts over a provider: one write with an immediate per put, by the same call and with the same
// flags as the proxy uses, and reads of the completion queue.
class RawPuts final : public Puts {
  public:
    explicit RawPuts(const NetworkPlace& place)
        : peer_(1 - static_cast<u32>(place.rank)), endpoint_(place, 4 * kInFlight) {
        for (fi_context2& context : contexts_) free_.push_back(&context);
    }

    std::string name() const override { return endpoint_.name(); }

    bool post(u64 source, u64 target, u64 bytes) override {
        if (free_.empty() || !endpoint_.knows(peer_)) return false;
        const LibfabricEndpoint::Write write(endpoint_, peer_, source, target, bytes, 0, free_.back());
        const ssize_t result = write.post();
        if (result == -FI_EAGAIN) return false;
        check(result, name() + ": a write");
        free_.pop_back();
        return true;
    }

    void step() override {
        std::array<fi_cq_data_entry, kEventsAtOnce> entries;
        const ssize_t count = fi_cq_read(endpoint_.queue(), entries.data(), entries.size());
        if (count == -FI_EAGAIN) return;
        check(count, name() + ": reading completions");
        for (ssize_t i = 0; i < count; ++i) {
            if (is_ours(entries[i].op_context)) {
                ++completed_;
                free_.push_back(static_cast<fi_context2*>(entries[i].op_context));
            } else if ((entries[i].flags & FI_REMOTE_CQ_DATA) != 0) {
                ++arrived_;
            }
        }
    }

    u64 completed() const override { return completed_; }
    u64 arrived() const override { return arrived_; }

  private:
    static constexpr size_t kInFlight = 256;
    static constexpr size_t kEventsAtOnce = 64;

    bool is_ours(void* context) const { return context >= contexts_.begin() && context < contexts_.end(); }

    const u32 peer_;
    std::array<fi_context2, kInFlight> contexts_;  // before the endpoint, which may use them until it is destroyed
    LibfabricEndpoint endpoint_;
    std::vector<fi_context2*> free_;
    u64 completed_ = 0, arrived_ = 0;
};

}  // namespace

std::unique_ptr<Puts> make_raw_puts(const NetworkPlace& place) { return std::make_unique<RawPuts>(place); }

}  // namespace deep_ep::host::proxy
