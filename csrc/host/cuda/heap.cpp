// Heaps in GPU memory: physical memory with a file descriptor, mapped into each process's address space. And heaps in
// the host's memory, pinned, that GPUs have mapped.
#include "host/cuda/memory.h"

namespace deep_ep::host {

using cuda::Allocation;
using cuda::AllocationProperties;
using cuda::DevicePointer;
using cuda::Driver;
using Current = cuda::PrimaryContext::Current;

namespace {

AllocationProperties properties_on(int ordinal) {
    AllocationProperties properties{};
    properties.type = cuda::kAllocationPinned;
    properties.handle_types = cuda::kHandleFileDescriptor;
    properties.location = {cuda::kLocationDevice, ordinal};
    return properties;
}

// Gives back, in the opposite order, what has been done so far.
class Mapping {
  public:
    Mapping(std::shared_ptr<const cuda::PrimaryContext> context, Allocation allocation, size_t bytes)
        : context_(std::move(context)), allocation_(allocation), bytes_(bytes) {}
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    ~Mapping() {
        const Driver& driver = Driver::get();
        const Current current(*context_);
        if (mapped_) driver.memory_unmap(base_, bytes_);
        if (base_ != 0) driver.address_free(base_, bytes_);
        driver.allocation_release(allocation_);
    }

    void map(size_t granularity) {
        const Driver& driver = Driver::get();
        driver.check(driver.address_reserve(&base_, bytes_, granularity, 0, 0), "reserving addresses for a heap");
        driver.check(driver.memory_map(base_, bytes_, 0, allocation_, 0), "mapping a heap");
        mapped_ = true;
        const cuda::MemoryAccess access{{cuda::kLocationDevice, context_->ordinal()}, cuda::kAccessReadWrite};
        driver.check(driver.memory_set_access(base_, bytes_, &access, 1),
                     "letting " + context_->name() + " access a heap");
    }
    DevicePointer base() const { return base_; }

  private:
    const std::shared_ptr<const cuda::PrimaryContext> context_;
    const Allocation allocation_;
    const size_t bytes_;
    DevicePointer base_ = 0;
    bool mapped_ = false;
};

size_t granularity_of(const AllocationProperties& properties) {
    const Driver& driver = Driver::get();
    size_t granularity = 0;
    driver.check(driver.granularity(&granularity, &properties, cuda::kGranularityRecommended),
                 "asking for the granularity of heaps");
    return granularity;
}

std::shared_ptr<Heap> as_heap(const std::shared_ptr<Mapping>& mapping, size_t bytes, int descriptor) {
    return std::make_shared<Heap>(reinterpret_cast<uint8_t*>(mapping->base()), bytes, descriptor, mapping);
}

}  // namespace

std::shared_ptr<Heap> make_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, size_t bytes) {
    const Driver& driver = Driver::get();
    const Current current(*context);
    const AllocationProperties properties = properties_on(context->ordinal());
    const size_t granularity = granularity_of(properties);
    bytes = (bytes + granularity - 1) / granularity * granularity;
    Allocation allocation = 0;
    driver.check(driver.allocation_create(&allocation, bytes, &properties, 0),
                 "allocating a heap of " + std::to_string(bytes) + " bytes on " + context->name());
    const auto mapping = std::make_shared<Mapping>(context, allocation, bytes);
    mapping->map(granularity);
    int descriptor = -1;
    driver.check(driver.allocation_export(&descriptor, allocation, cuda::kHandleFileDescriptor, 0),
                 "exporting a heap to other processes");
    return as_heap(mapping, bytes, descriptor);
}

std::shared_ptr<Heap> map_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, int descriptor,
                                    size_t bytes) {
    const Driver& driver = Driver::get();
    const Current current(*context);
    Allocation allocation = 0;
    // The handle is passed by value, as a pointer.
    void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    driver.check(driver.allocation_import(&allocation, handle, cuda::kHandleFileDescriptor), "importing a peer's heap");
    const auto mapping = std::make_shared<Mapping>(context, allocation, bytes);
    mapping->map(granularity_of(properties_on(context->ordinal())));
    return as_heap(mapping, bytes, -1);
}

void pin_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, Heap& heap) {
    const Driver& driver = Driver::get();
    const Current current(*context);
    if (context->attribute(cuda::kCanUseHostPointer) == 0) {
        throw cuda::CudaError(context->name() +
                              " cannot use the host's memory under its address, as NICs in software need");
    }
    driver.check(driver.host_register(heap.base(), heap.bytes(), cuda::kRegisterPortable | cuda::kRegisterDeviceMap),
                 "pinning a heap of " + std::to_string(heap.bytes()) + " bytes in host memory");
    heap.keep(std::shared_ptr<void>(heap.base(), [context](void* pinned) {
        const Current current(*context);
        Driver::get().host_unregister(pinned);
    }));
}

}  // namespace deep_ep::host
