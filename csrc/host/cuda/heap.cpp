// Heaps in GPU memory: physical memory with file descriptors, mapped into the address space of each process piece by
// piece, at addresses that are all reserved at the start. Also heaps in pinned host memory that GPUs have mapped.
#include <algorithm>
#include <atomic>
#include <mutex>

#include "host/cuda/memory.h"

namespace deep_ep::host {

using cuda::Allocation;
using cuda::AllocationProperties;
using cuda::DevicePointer;
using cuda::Driver;
using Current = cuda::PrimaryContext::Current;

namespace {

// `exported`: to other processes by descriptors, which not every GPU and system supports.
AllocationProperties properties_on(int ordinal, bool exported) {
    AllocationProperties properties{};
    properties.type = cuda::kAllocationPinned;
    properties.handle_types = exported ? cuda::kHandleFileDescriptor : cuda::kHandleNone;
    properties.location = {cuda::kLocationDevice, ordinal};
    return properties;
}

size_t granularity_of(const AllocationProperties& properties) {
    const Driver& driver = Driver::get();
    size_t granularity = 0;
    driver.check(driver.granularity(&granularity, &properties, cuda::kGranularityRecommended),
                 "asking for the granularity of heaps");
    return granularity;
}

size_t round_up(size_t bytes, size_t granularity) { return (bytes + granularity - 1) / granularity * granularity; }

// Physical memory, released with the object; it persists as long as any process has it mapped.
class Physical {
  public:
    Physical(std::shared_ptr<const cuda::PrimaryContext> context, Allocation allocation, size_t bytes)
        : context_(std::move(context)), allocation_(allocation), bytes_(bytes) {}
    Physical(const Physical&) = delete;
    Physical& operator=(const Physical&) = delete;

    ~Physical() {
        const Driver& driver = Driver::get();
        const Current current(*context_, std::nothrow);
        if (!current) return;
        if (mapped_at_ != 0) driver.memory_unmap(mapped_at_, bytes_);
        driver.allocation_release(allocation_);
    }

    void map(DevicePointer address) {
        const Driver& driver = Driver::get();
        driver.check(driver.memory_map(address, bytes_, 0, allocation_, 0), "mapping a heap");
        mapped_at_ = address;
        const cuda::MemoryAccess access{{cuda::kLocationDevice, context_->ordinal()}, cuda::kAccessReadWrite};
        driver.check(driver.memory_set_access(address, bytes_, &access, 1),
                     "letting " + context_->name() + " access a heap");
    }
    // The caller closes it.
    int descriptor() const {
        const Driver& driver = Driver::get();
        int descriptor = -1;
        driver.check(driver.allocation_export(&descriptor, allocation_, cuda::kHandleFileDescriptor, 0),
                     "exporting a heap to other processes");
        return descriptor;
    }
    size_t bytes() const { return bytes_; }

  private:
    const std::shared_ptr<const cuda::PrimaryContext> context_;
    const Allocation allocation_;
    const size_t bytes_;
    DevicePointer mapped_at_ = 0;
};

// `bytes`, here and below: a multiple of the granularity.
std::unique_ptr<Physical> make_physical(const std::shared_ptr<const cuda::PrimaryContext>& context, size_t bytes,
                                        bool exported) {
    const Driver& driver = Driver::get();
    const AllocationProperties properties = properties_on(context->ordinal(), exported);
    Allocation allocation = 0;
    driver.check(driver.allocation_create(&allocation, bytes, &properties, 0),
                 "allocating a heap of " + std::to_string(bytes) + " bytes on " + context->name());
    return std::make_unique<Physical>(context, allocation, bytes);
}

std::unique_ptr<Physical> import_physical(const std::shared_ptr<const cuda::PrimaryContext>& context, int descriptor,
                                          size_t bytes) {
    const Driver& driver = Driver::get();
    Allocation allocation = 0;
    // The handle is passed by value, as a pointer.
    void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    driver.check(driver.allocation_import(&allocation, handle, cuda::kHandleFileDescriptor), "importing a peer's heap");
    return std::make_unique<Physical>(context, allocation, bytes);
}

// A reserved address range whose first part is backed by memory.
class Addresses {
  public:
    Addresses(std::shared_ptr<const cuda::PrimaryContext> context, size_t bytes, size_t granularity)
        : context_(std::move(context)), bytes_(bytes), granularity_(granularity) {
        const Driver& driver = Driver::get();
        driver.check(driver.address_reserve(&base_, bytes_, granularity, 0, 0), "reserving addresses for a heap");
    }
    Addresses(const Addresses&) = delete;
    Addresses& operator=(const Addresses&) = delete;

    ~Addresses() {
        const Current current(*context_, std::nothrow);
        pieces_.clear();
        if (current) Driver::get().address_free(base_, bytes_);
    }

    // Maps a piece at the end of the mapped part.
    void map(std::unique_ptr<Physical> piece) {
        const size_t bytes = piece->bytes();
        if (bytes > bytes_ - mapped()) throw std::logic_error("a heap grew beyond its addresses");
        piece->map(base_ + mapped());
        pieces_.push_back(std::move(piece));
        mapped_.store(mapped() + bytes, std::memory_order_relaxed);
    }

    const std::shared_ptr<const cuda::PrimaryContext>& context() const { return context_; }
    DevicePointer base() const { return base_; }
    size_t bytes() const { return bytes_; }
    size_t granularity() const { return granularity_; }
    // May be called by any thread. Relaxed, since a thread that uses the memory is ordered after map() by other means.
    size_t mapped() const { return mapped_.load(std::memory_order_relaxed); }
    const std::vector<std::unique_ptr<Physical>>& pieces() const { return pieces_; }

  private:
    const std::shared_ptr<const cuda::PrimaryContext> context_;
    const size_t bytes_;
    const size_t granularity_;
    DevicePointer base_ = 0;
    std::atomic<size_t> mapped_{0};
    std::vector<std::unique_ptr<Physical>> pieces_;
};

class CudaHeap final : public Heap {
  public:
    // `exported`: whether the pieces by which it grows can be exported, too.
    CudaHeap(const std::shared_ptr<Addresses>& addresses, int descriptor, bool exported)
        : Heap(reinterpret_cast<uint8_t*>(addresses->base()), addresses->bytes(), descriptor, addresses),
          addresses_(*addresses),
          exported_(exported) {}

    size_t mapped() const override { return addresses_.mapped(); }

    bool grow(size_t bytes) override {
        const Current current(*addresses_.context());
        const std::lock_guard<std::mutex> lock(mutex_);
        bytes = std::min(round_up(bytes, addresses_.granularity()), addresses_.bytes() - mapped());
        if (bytes == 0) return false;
        addresses_.map(make_physical(addresses_.context(), bytes, exported_));
        return true;
    }

    std::vector<Piece> added() const override {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Piece> added;
        size_t offset = 0;
        for (const auto& piece : addresses_.pieces()) {
            if (offset != 0) added.push_back({offset, piece->bytes()});
            offset += piece->bytes();
        }
        return added;
    }

    int export_piece(const Piece& wanted) const override {
        const Current current(*addresses_.context());
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t offset = 0;
        for (const auto& piece : addresses_.pieces()) {
            if (offset == wanted.offset) return piece->descriptor();
            offset += piece->bytes();
        }
        throw std::invalid_argument("no piece of the heap begins at " + std::to_string(wanted.offset));
    }

    void map_piece(const Piece& piece, int descriptor) override {
        const Current current(*addresses_.context());
        const std::lock_guard<std::mutex> lock(mutex_);
        if (piece.offset != mapped()) throw std::logic_error("a peer's pieces are out of order");
        addresses_.map(import_physical(addresses_.context(), descriptor, piece.bytes));
    }

  private:
    Addresses& addresses_;  // kept alive by the base class
    const bool exported_;
    mutable std::mutex mutex_;  // guards its pieces
};

// Reserves addresses for `bytes`. Rounds up both sizes.
std::shared_ptr<Addresses> reserve(const std::shared_ptr<const cuda::PrimaryContext>& context, size_t bytes,
                                   size_t& first, bool exported) {
    const size_t granularity = granularity_of(properties_on(context->ordinal(), exported));
    bytes = round_up(bytes, granularity);
    first = std::min(round_up(first, granularity), bytes);
    return std::make_shared<Addresses>(context, bytes, granularity);
}

// Clears memory, since physical memory still holds the data of its previous user. The zeros are visible to every agent
// on return.
void clear(const Addresses& addresses, size_t bytes) {
    if (bytes == 0) return;
    if (bytes > addresses.mapped()) {
        throw std::invalid_argument("cleared=" + std::to_string(bytes) + ": expected at most " +
                                    std::to_string(addresses.mapped()));
    }
    CudaMemory(addresses.context()).fill(reinterpret_cast<void*>(addresses.base()), 0, bytes);
}

}  // namespace

std::shared_ptr<Heap> make_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, size_t bytes,
                                     size_t first, size_t cleared, bool exported) {
    const Current current(*context);
    const auto addresses = reserve(context, bytes, first, exported);
    addresses->map(make_physical(context, first, exported));
    // Must precede the descriptor and the Heap, through which a peer could store here: its data must not be
    // overwritten.
    clear(*addresses, cleared);
    const int descriptor = exported ? addresses->pieces().front()->descriptor() : -1;
    return std::make_shared<CudaHeap>(addresses, descriptor, exported);
}

std::shared_ptr<Heap> map_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, int descriptor,
                                    size_t bytes, size_t first) {
    const Current current(*context);
    const auto addresses = reserve(context, bytes, first, true);
    addresses->map(import_physical(context, descriptor, first));
    return std::make_shared<CudaHeap>(addresses, -1, true);
}

void pin_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, Heap& heap) {
    const Driver& driver = Driver::get();
    const Current current(*context);
    if (context->attribute(cuda::kCanUseHostPointer) == 0) {
        throw cuda::CudaError(context->name() +
                              " cannot access host memory at its host address, which software NICs need");
    }
    driver.check(driver.host_register(heap.base(), heap.bytes(), cuda::kRegisterPortable | cuda::kRegisterDeviceMap),
                 "pinning a heap of " + std::to_string(heap.bytes()) + " bytes in host memory");
    heap.keep(std::shared_ptr<void>(heap.base(), [context](void* pinned) {
        const Current current(*context, std::nothrow);
        if (current) Driver::get().host_unregister(pinned);
    }));
}

}  // namespace deep_ep::host
