// The stand-in's memory: device memory is host memory.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "double.h"
#include "execute.h"

using namespace driver_double;

namespace {

constexpr size_t kGranularity = 2 << 20;

std::map<const void*, size_t> host_bytes;    // of allocations in host memory
std::map<const void*, size_t> device_bytes;  // of allocations in device memory, and of the above

struct Owner {
    size_t bytes;
    Device device;
};
std::map<const void*, Owner> owners;  // of memory that others have allocated

// Memory is never clean: it holds the contents of an earlier allocation of its size, or a pattern.
constexpr char kNeverWritten = '\xee';
constexpr size_t kMaxRemembered = 4 << 20;
std::map<size_t, std::string> leftovers;  // by size of the allocation: its first bytes

const std::string& dirt(size_t bytes) {
    return leftovers.try_emplace(bytes, std::min(bytes, kMaxRemembered), kNeverWritten).first->second;
}
void make_dirty(void* memory, size_t bytes) {
    const std::string& found = dirt(bytes);
    std::memcpy(memory, found.data(), found.size());
    std::memset(static_cast<char*>(memory) + found.size(), kNeverWritten, bytes - found.size());
}
bool make_dirty(int file, size_t bytes) {
    const std::string& found = dirt(bytes);
    const std::string page(1 << 20, kNeverWritten);
    size_t at = 0;
    while (at < bytes) {
        const std::string& source = at < found.size() ? found : page;
        const size_t skip = at < found.size() ? at : 0, part = std::min(source.size() - skip, bytes - at);
        const ssize_t written = pwrite(file, source.data() + skip, part, static_cast<off_t>(at));
        if (written <= 0) return false;
        at += static_cast<size_t>(written);
    }
    return true;
}
void leave(const void* memory, size_t bytes) {
    leftovers[bytes].assign(static_cast<const char*>(memory), std::min(bytes, kMaxRemembered));
}
void leave(int file, size_t bytes) {
    std::string& left = leftovers[bytes];
    left.resize(std::min(bytes, kMaxRemembered));
    const ssize_t read = pread(file, left.data(), left.size(), 0);
    left.resize(read > 0 ? static_cast<size_t>(read) : 0);
}

// Copies and fills run when their stream is waited for, or when a kernel is launched after them.
std::map<const void*, std::vector<std::function<void()>>> queued;

// Whether a location is a device that this process sees: other processes' ordinals mean nothing here.
bool here(const MemoryLocation& location) {
    return location.type == kLocationDevice && location.id >= 0 && location.id < devices();
}

// Physical memory is an anonymous file, so that its descriptor works between processes. Mapping replaces reserved
// addresses, which fault while nothing is mapped there.
struct Physical {
    int file;
    size_t bytes;
    bool imported;
    bool exported;
};
std::map<Allocation, Physical> physical;
std::map<DevicePointer, size_t> reserved, mapped;
std::map<DevicePointer, int> gpu_of_mapped;  // the machine's index of the GPU whose memory it is

// The file is named after its GPU, which any process may ask for.
int make_file(int gpu) { return memfd_create(std::to_string(gpu).c_str(), 0); }
int gpu_of_file(int file) {
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    char name[64] = {};
    const ssize_t length = readlink(link.c_str(), name, sizeof(name) - 1);
    return length > 7 ? std::atoi(name + 7) : -1;  // "/memfd:1 (deleted)"
}
bool may_access(int gpu, int memory) {
    return gpu == memory || (has_access(gpu, memory) && has_access(memory, gpu) && !flag("DOUBLE_MAP_REFUSED"));
}

// The range that contains [address, address + bytes), or the end.
std::map<DevicePointer, size_t>::iterator find_range(std::map<DevicePointer, size_t>& ranges, DevicePointer address,
                                                     size_t bytes) {
    auto range = ranges.upper_bound(address);
    if (range == ranges.begin()) return ranges.end();
    --range;
    return address + bytes <= range->first + range->second ? range : ranges.end();
}
bool anything_mapped(DevicePointer address, size_t bytes) {
    const auto next = mapped.lower_bound(address);
    return (next != mapped.end() && next->first < address + bytes) ||
           (next != mapped.begin() && std::prev(next)->first + std::prev(next)->second > address);
}
bool protect(DevicePointer address, size_t bytes, int protection, int flags, int file) {
    void* place = reinterpret_cast<void*>(address);
    return mmap(place, bytes, protection, flags | MAP_FIXED, file, 0) == place;
}

}  // namespace

namespace driver_double {

void finish_copies(const void* stream) {
    for (const auto& copy : std::exchange(queued[stream], {})) copy();
    queued.erase(stream);
}

bool has_copies(const void* stream) { return queued.count(stream) != 0; }

int alive_heaps() { return static_cast<int>(physical.size() + reserved.size() + mapped.size()); }

size_t host_allocation_bytes(const void* address) {
    const auto found = host_bytes.find(address);
    return found == host_bytes.end() ? 0 : found->second;
}

}  // namespace driver_double

#pragma GCC visibility push(default)
extern "C" {

Result cuMemAlloc_v2(DevicePointer* address, size_t bytes) {
    BEGIN(enter_outside_capture("cuMemAlloc"));
    constexpr size_t kAlignment = 256;
    void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    make_dirty(memory, bytes);
    driver_double::note_memory(memory, bytes);
    alive.insert(memory);
    device_bytes[memory] = bytes;
    *address = reinterpret_cast<DevicePointer>(memory);
    return kSuccess;
}
Result cuMemFree_v2(DevicePointer address) {
    BEGIN(enter_in_context("cuMemFree"));
    void* memory = reinterpret_cast<void*>(address);
    RETURN_IF_FAILED(forget(memory));
    driver_double::drop_memory(memory);
    leave(memory, device_bytes[memory]);
    device_bytes.erase(memory);
    std::free(memory);
    return kSuccess;
}
Result cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    BEGIN(enter_outside_capture("cuMemHostAlloc"));
    if (flags != (kHostPortable | kHostDeviceMap)) return kInvalidValue;
    DevicePointer memory = 0;
    RETURN_IF_FAILED(cuMemAlloc_v2(&memory, bytes));
    *address = reinterpret_cast<void*>(memory);
    host_bytes[*address] = bytes;
    driver_double::share(*address, bytes);
    return kSuccess;
}
Result cuMemFreeHost(void* address) {
    if (shut_down) return kDeinitialized;
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    host_bytes.erase(address);
    driver_double::unshare(address);
    return cuMemFree_v2(reinterpret_cast<DevicePointer>(address));
}
Result cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
    BEGIN(enter_outside_capture("cuMemHostRegister"));
    if (flags != (kRegisterPortable | kRegisterDeviceMap) || bytes == 0) return kInvalidValue;
    if (!alive.insert(address).second) return kAlreadyRegistered;
    driver_double::note_memory(address, bytes);
    driver_double::share(address, bytes);
    return kSuccess;
}
Result cuMemHostUnregister(void* address) {
    BEGIN(enter_in_context("cuMemHostUnregister"));
    driver_double::unshare(address);
    driver_double::drop_memory(address);
    return forget(address);
}
void double_share(const void* address, size_t bytes) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    driver_double::share(address, bytes);
}
void double_unshare(const void* address) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    driver_double::unshare(address);
}
void double_own(const void* address, size_t bytes) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    owners[address] = {bytes, contexts.back()};
}
void double_disown(const void* address) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    owners.erase(address);
}
Result cuPointerGetAttribute(void* value, int which, DevicePointer pointer) {
    BEGIN(enter("cuPointerGetAttribute", "%d", which));
    if (which != kPointerDevice) return kInvalidValue;
    for (const auto& [address, owner] : owners) {
        const DevicePointer begin = reinterpret_cast<DevicePointer>(address);
        if (pointer < begin || pointer >= begin + owner.bytes) continue;
        std::memcpy(value, &owner.device, sizeof(owner.device));
        return kSuccess;
    }
    return kInvalidValue;
}
Result cuMemsetD8Async(DevicePointer address, unsigned char byte, size_t bytes, Stream stream) {
    BEGIN(enter_in_context("cuMemsetD8Async"));
    if (!alive.count(stream)) return kInvalidHandle;
    queued[stream].push_back([=] { std::memset(reinterpret_cast<void*>(address), byte, bytes); });
    return kSuccess;
}
Result cuMemcpyHtoDAsync_v2(DevicePointer target, const void* source, size_t bytes, Stream stream) {
    BEGIN(enter_in_context("cuMemcpyHtoDAsync"));
    if (!alive.count(stream)) return kInvalidHandle;
    queued[stream].push_back([=] { std::memcpy(reinterpret_cast<void*>(target), source, bytes); });
    return kSuccess;
}
Result cuMemcpyDtoHAsync_v2(void* target, DevicePointer source, size_t bytes, Stream stream) {
    BEGIN(enter_in_context("cuMemcpyDtoHAsync"));
    if (!alive.count(stream)) return kInvalidHandle;
    queued[stream].push_back([=] { std::memcpy(target, reinterpret_cast<const void*>(source), bytes); });
    return kSuccess;
}
Result cuMemGetAllocationGranularity(size_t* granularity, const AllocationProperties* properties, int) {
    BEGIN(enter_in_context("cuMemGetAllocationGranularity"));
    if (properties->type != kAllocationPinned || properties->location.type != kLocationDevice) return kInvalidValue;
    *granularity = kGranularity;
    return kSuccess;
}
Result cuMemCreate(Allocation* allocation, size_t bytes, const AllocationProperties* properties, unsigned long long) {
    BEGIN(enter_in_context("cuMemCreate"));
    const char* const largest = std::getenv("DOUBLE_LARGEST");
    if (largest != nullptr && bytes > std::strtoull(largest, nullptr, 10)) return kOutOfMemory;
    if (bytes % kGranularity != 0 || properties->handle_types > kHandleFileDescriptor) return kInvalidValue;
    if (!here(properties->location)) return kInvalidDevice;
    const int file = make_file(gpu_of_machine(properties->location.id));
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0 || !make_dirty(file, bytes)) return kInvalidValue;
    *allocation = next_handle += 0x10;
    physical[*allocation] = {file, bytes, false, properties->handle_types == kHandleFileDescriptor};
    return kSuccess;
}
Result cuMemRelease(Allocation allocation) {
    BEGIN(enter_in_context("cuMemRelease"));
    const auto found = physical.find(allocation);
    if (found == physical.end()) return kInvalidHandle;
    if (!found->second.imported) leave(found->second.file, found->second.bytes);
    close(found->second.file);
    physical.erase(found);
    return kSuccess;
}
Result cuMemExportToShareableHandle(void* handle, Allocation allocation, int type, unsigned long long) {
    BEGIN(enter_in_context("cuMemExportToShareableHandle"));
    if (type != kHandleFileDescriptor || !physical.count(allocation)) return kInvalidValue;
    if (!physical[allocation].exported) return kInvalidValue;
    *static_cast<int*>(handle) = dup(physical[allocation].file);
    return kSuccess;
}
Result cuMemImportFromShareableHandle(Allocation* allocation, void* handle, int type) {
    BEGIN(enter_in_context("cuMemImportFromShareableHandle"));
    const int file = dup(static_cast<int>(reinterpret_cast<intptr_t>(handle)));
    struct stat status{};
    if (type != kHandleFileDescriptor || file < 0 || fstat(file, &status) != 0) return kInvalidValue;
    *allocation = next_handle += 0x10;
    physical[*allocation] = {file, static_cast<size_t>(status.st_size), true, true};
    return kSuccess;
}
Result cuMemAddressReserve(DevicePointer* address, size_t bytes, size_t, DevicePointer, unsigned long long) {
    BEGIN(enter_in_context("cuMemAddressReserve"));
    if (bytes % kGranularity != 0) return kInvalidValue;
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return kInvalidValue;
    *address = reinterpret_cast<DevicePointer>(memory);
    reserved[*address] = bytes;
    return kSuccess;
}
Result cuMemAddressFree(DevicePointer address, size_t bytes) {
    BEGIN(enter_in_context("cuMemAddressFree"));
    if (!reserved.count(address) || reserved[address] != bytes || anything_mapped(address, bytes)) return kInvalidValue;
    munmap(reinterpret_cast<void*>(address), bytes);
    reserved.erase(address);
    return kSuccess;
}
Result cuMemMap(DevicePointer address, size_t bytes, size_t offset, Allocation allocation, unsigned long long) {
    BEGIN(enter_in_context("cuMemMap"));
    if (std::getenv("DOUBLE_MAP_WAITS")) wait_for_kernels();
    while (std::getenv("DOUBLE_MAP_HANGS")) usleep(100'000);
    if (find_range(reserved, address, bytes) == reserved.end() || anything_mapped(address, bytes)) return kInvalidValue;
    if (address % kGranularity != 0 || offset != 0) return kInvalidValue;
    if (!physical.count(allocation) || physical[allocation].bytes != bytes) return kInvalidValue;
    if (!protect(address, bytes, PROT_NONE, MAP_SHARED, physical[allocation].file)) return kInvalidValue;
    driver_double::note_memory(reinterpret_cast<const void*>(address), bytes);
    mapped[address] = bytes;
    gpu_of_mapped[address] = gpu_of_file(physical[allocation].file);
    return kSuccess;
}
Result cuMemUnmap(DevicePointer address, size_t bytes) {
    BEGIN(enter_in_context("cuMemUnmap"));
    if (!mapped.count(address) || mapped[address] != bytes) return kInvalidValue;
    if (!protect(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1)) return kInvalidValue;
    driver_double::drop_memory(reinterpret_cast<const void*>(address));
    mapped.erase(address);
    return kSuccess;
}
Result cuMemSetAccess(DevicePointer address, size_t bytes, const MemoryAccess* access, size_t count) {
    BEGIN(enter_in_context("cuMemSetAccess"));
    if (!mapped.count(address) || mapped[address] != bytes || count != 1 || access->flags != kAccessReadWrite)
        return kInvalidValue;
    if (!here(access->location)) return kInvalidDevice;
    if (!may_access(gpu_of_machine(access->location.id), gpu_of_mapped[address])) return kPeersUnsupported;
    return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}

}  // extern "C"
#pragma GCC visibility pop
