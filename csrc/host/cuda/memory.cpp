#include "host/cuda/memory.h"

#include <cstring>

namespace deep_ep::host {

using cuda::DevicePointer;
using cuda::Driver;
using Current = cuda::PrimaryContext::Current;

namespace {

DevicePointer device(const void* address) { return reinterpret_cast<DevicePointer>(address); }

std::string sized(const char* doing, size_t bytes) {
    return std::string(doing) + " of " + std::to_string(bytes) + " bytes";
}

}  // namespace

CudaMemory::CudaMemory(std::shared_ptr<const cuda::PrimaryContext> context) : context_(std::move(context)) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    word_ = make_shared(sizeof(uint64_t));
    driver.check(driver.stream_create(&stream_, cuda::kStreamNonBlocking, 0), "making a stream for copies");
}

CudaMemory::~CudaMemory() {
    const Current current(*context_, std::nothrow);
    if (current) Driver::get().stream_destroy(stream_);
}

std::shared_ptr<void> CudaMemory::make_private(size_t bytes) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    DevicePointer address = 0;
    driver.check(driver.memory_allocate(&address, bytes), sized("an allocation", bytes));
    std::shared_ptr<void> memory(reinterpret_cast<void*>(address), [context = context_](void* freed) {
        const Current current(*context, std::nothrow);
        if (current) Driver::get().memory_free(device(freed));
    });
    fill(memory.get(), 0, bytes);
    return memory;
}

std::shared_ptr<void> CudaMemory::make_shared(size_t bytes) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    void* address = nullptr;
    // The device uses the same address.
    driver.check(driver.host_allocate(&address, bytes, cuda::kHostPortable | cuda::kHostDeviceMap),
                 sized("an allocation in host memory", bytes));
    std::memset(address, 0, bytes);
    return {address, [context = context_](void* freed) {
                const Current current(*context, std::nothrow);
                if (current) Driver::get().host_free(freed);
            }};
}

void CudaMemory::synchronize(const char* doing) {
    const Driver& driver = Driver::get();
    driver.check(driver.stream_synchronize(stream_), doing);
}

void CudaMemory::write(void* target, const void* source, size_t bytes) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    driver.check(driver.copy_to_device(device(target), source, bytes, stream_), sized("a copy to the GPU", bytes));
    synchronize("a copy to the GPU");
}

void CudaMemory::fill(void* target, uint8_t byte, size_t bytes) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    driver.check(driver.fill(device(target), byte, bytes, stream_), sized("filling memory", bytes));
    synchronize("filling memory");
}

void CudaMemory::read(void* target, const void* source, size_t bytes) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    driver.check(driver.copy_to_host(target, device(source), bytes, stream_), sized("a copy from the GPU", bytes));
    synchronize("a copy from the GPU");
}

uint64_t CudaMemory::load_word(const uint64_t* word) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    const std::lock_guard<std::mutex> guard(mutex_);
    driver.check(driver.copy_to_host(word_.get(), device(word), sizeof(uint64_t), stream_), "reading a word");
    synchronize("reading a word");
    return *static_cast<const uint64_t*>(word_.get());
}

void CudaMemory::store_words(const std::vector<uint64_t*>& words, uint64_t value) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    const std::lock_guard<std::mutex> guard(mutex_);
    *static_cast<uint64_t*>(word_.get()) = value;
    for (uint64_t* word : words) {
        // One aligned word: kernels that poll it see either the old or the new value.
        driver.check(driver.copy_to_device(device(word), word_.get(), sizeof(uint64_t), stream_), "storing a word");
    }
    synchronize("storing words");
}

}  // namespace deep_ep::host
