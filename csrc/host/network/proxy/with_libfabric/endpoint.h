// A rank's endpoint at a libfabric provider. The endpoint opens itself, registers memory, publishes its address, and
// looks up those of the other ranks; posting is left to its user. Only for sources that are compiled with libfabric's
// headers.
#pragma once

#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include <memory>
#include <string>
#include <vector>

#include "host/network/network.h"
#include "host/network/proxy/with_libfabric/library.h"

namespace deep_ep::host::proxy {

// Closes a libfabric object by fi_close().
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

// Throws std::invalid_argument if `result` is an error.
void check(long result, const std::string& doing);

class LibfabricEndpoint {
  public:
    struct Peer {
        bool known = false;
        fi_addr_t address = FI_ADDR_UNSPEC;  // as long as the peer cannot be reached
        u64 base = 0, key = 0;
        std::string provider;
    };

    // Uses `place.provider`, or the best provider if that is empty. `events`: the capacity of the completion queue.
    LibfabricEndpoint(const NetworkPlace& place, size_t events);

    std::string name() const { return std::string("libfabric's ") + info_->fabric_attr->prov_name; }
    u64 max_bytes() const;
    bool is_published(u32 peer) const;
    // Whether the peer has published its address and this side has read it.
    bool knows(u32 peer);
    // Network::look_up_peers().
    int look_up_all();
    const Peer& peer(u32 peer) const { return peers_[peer]; }
    fid_ep* endpoint() const { return endpoint_.get(); }
    fid_cq* queue() const { return queue_.get(); }

    // A write from this rank's heap to the heap of a known peer. It also stores the parts of the request.
    class Write {
      public:
        Write(const LibfabricEndpoint& from, u32 peer, u64 source, u64 target, u64 bytes, u32 immediate, void* context);
        Write(const Write&) = delete;
        Write& operator=(const Write&) = delete;
        // Returns 0 or libfabric's error. FI_DELIVERY_COMPLETE is needed because otherwise a write that is never
        // delivered may complete.
        ssize_t post() const {
            return fi_writemsg(endpoint_, &request_, FI_REMOTE_CQ_DATA | FI_COMPLETION | FI_DELIVERY_COMPLETE);
        }

      private:
        fid_ep* const endpoint_;
        iovec from_;
        void* described_;
        fi_rma_iov to_;
        fi_msg_rma request_{};
    };

  private:
    void open(size_t events);
    void register_memory();
    Owned<fid_mr> registered(u64 offset, u64 bytes, u64 access, u64 key);
    void publish();

    const NetworkPlace place_;
    const Info info_;
    // In the order of creation: they are destroyed in reverse.
    Owned<fid_fabric> fabric_;
    Owned<fid_domain> domain_;
    Owned<fid_cq> queue_;
    Owned<fid_av> vector_;
    Owned<fid_mr> written_, local_;
    Owned<fid_ep> endpoint_;
    std::vector<Peer> peers_;
};

}  // namespace deep_ep::host::proxy
