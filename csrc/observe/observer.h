// Hosts and NICs report their accesses to memory that kernels also use to a tool, so that it can check their order.
// Without a tool each of these functions is just the access itself.
#pragma once

#include <atomic>
#include <type_traits>

#include "wire/types.h"

namespace deep_ep::observe {

// The originator of an access: something that acts serially, such as a queue pair, and the rank that it serves.
enum class Kind : u8 { kHost, kProxy, kNic };
struct Accessor {
    Kind kind;
    const void* self;
    u32 rank;
};

class Observer {
  public:
    virtual ~Observer() = default;
    // No kernel accesses memory between these two.
    virtual void lock() = 0;
    virtual void unlock() = 0;
    // An acquire load, at system scope, of a word that holds `newest`. Returns the value that the load sees. It may be
    // an older one unless something that happened before the load, or that `behind` has acquired, forbids it. If
    // `behind` is null it is the newest.
    virtual u64 load_word(const Accessor& by, const void* word, u32 bytes, u64 newest, const Accessor* behind) = 0;
    // A relaxed load of a word, at system scope.
    virtual void look(const Accessor& by, const void* word, u32 bytes) = 0;
    // A release store to a word, at system scope. `updates`: by a read-modify-write.
    virtual void store_word(const Accessor& by, const void* word, u32 bytes, u64 before, u64 after, bool updates) = 0;
    // Plain accesses. They throw if they race.
    virtual void read(const Accessor& by, const void* memory, u64 bytes) = 0;
    virtual void write(const Accessor& by, const void* memory, u64 bytes) = 0;
    // Hosts synchronize at meetings and by messages: tell_hosts releases, hear_hosts acquires. An accessor acquires
    // what all hosts have released, which is more than its own messages imply.
    virtual void tell_hosts(const Accessor& by) = 0;
    virtual void hear_hosts(const Accessor& by) = 0;
    // Its rank's host has created the accessor, which is ordered after all that this host is ordered after.
    virtual void begin(const Accessor& by) = 0;
    // Kernels share this memory with a device on the bus. To be called before they use it.
    virtual void share(const Accessor&, const void*, u64) {}
    // The accessor makes no further access, and its rank's host knows that.
    virtual void end(const Accessor& by) = 0;
};

// At most one at a time; null: none. It is installed and removed while no kernel and no NIC runs.
inline std::atomic<Observer*> observer{nullptr};

// The observer, locked for the lifetime of this object.
class Observed {
  public:
    Observed() : observer_(observer.load(std::memory_order_acquire)) {
        if (observer_ != nullptr) observer_->lock();
    }
    ~Observed() {
        if (observer_ != nullptr) observer_->unlock();
    }
    Observed(const Observed&) = delete;
    Observed& operator=(const Observed&) = delete;
    explicit operator bool() const { return observer_ != nullptr; }
    Observer* operator->() const { return observer_; }

  private:
    Observer* const observer_;
};

// The host of a rank, including all of its threads.
constexpr Accessor host(u32 rank) { return {Kind::kHost, nullptr, rank}; }

// A thread of a rank's proxy.
constexpr Accessor proxy(u32 rank) { return {Kind::kProxy, nullptr, rank}; }

namespace detail {

// An accessor that polls sees the newest value eventually, so it may as well see it at once.
template <int kOrder, class T>
T load_newest(const Accessor& by, const T* word) {
    const Observed observed;
    const T newest = __atomic_load_n(word, kOrder);
    if (observed) observed->load_word(by, word, sizeof(T), newest, nullptr);
    return newest;
}

}  // namespace detail

template <class T>
T load_acquire(const Accessor& by, const T* word) {
    return detail::load_newest<__ATOMIC_ACQUIRE>(by, word);
}
// Loads a device register, which holds the last value written. The caller's fence orders what follows after the load.
template <class T>
T load_register(const Accessor& by, const T* word) {
    return detail::load_newest<__ATOMIC_RELAXED>(by, word);
}
// A single load, after `behind` has loaded a word: it may return a value that is older than the newest.
template <class T>
T load_acquire_once(const Accessor& by, const T* word, const Accessor& behind) {
    const Observed observed;
    const T newest = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    return observed ? static_cast<T>(observed->load_word(by, word, sizeof(T), newest, &behind)) : newest;
}

template <class T>
void store_release(const Accessor& by, T* word, T value) {
    const Observed observed;
    if (observed) observed->store_word(by, word, sizeof(T), *word, value, false);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

template <class T>
T add_release(const Accessor& by, T* word, T value) {
    const Observed observed;
    const T before = __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
    if (observed) observed->store_word(by, word, sizeof(T), before, before + value, true);
    return before;
}

// For a word that is loaded or stored by other means: by a copy, or through a device. To be called before the access.
template <class T>
void look(const Accessor& by, const T* word) {
    if (const Observed observed; observed) observed->look(by, word, sizeof(T));
}
template <class T>
void leave(const Accessor& by, const T* word, std::type_identity_t<T> value) {
    const Observed observed;
    if (observed) observed->store_word(by, word, sizeof(T), __atomic_load_n(word, __ATOMIC_RELAXED), value, false);
}

// To be called before the access.
inline void read(const Accessor& by, const void* memory, u64 bytes) {
    if (const Observed observed; observed) observed->read(by, memory, bytes);
}
inline void write(const Accessor& by, const void* memory, u64 bytes) {
    if (const Observed observed; observed) observed->write(by, memory, bytes);
}
inline void tell_hosts(const Accessor& by) {
    if (const Observed observed; observed) observed->tell_hosts(by);
}
inline void hear_hosts(const Accessor& by) {
    if (const Observed observed; observed) observed->hear_hosts(by);
}
inline void begin(const Accessor& by) {
    if (const Observed observed; observed) observed->begin(by);
}
inline void share(const Accessor& by, const void* memory, u64 bytes) {
    if (const Observed observed; observed) observed->share(by, memory, bytes);
}
inline void end(const Accessor& by) {
    if (const Observed observed; observed) observed->end(by);
}

}  // namespace deep_ep::observe
