// The receiving side of a proxy: immediates become totals in signal words (P18). It is the only writer of the words of
// the ranks that it hears, and stores totals, so that memory without atomics for the host suffices.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "observe/observer.h"
#include "wire/heap_layout.h"
#include "wire/proxy.h"

namespace deep_ep::host::proxy {

class Receiver {
  public:
    // `bank`: the words that this rank's host stores (wire/far_words.h). `hears`: whether a rank's messages count.
    Receiver(u8* bank, const wire::HeapLayout& layout, u32 generation, u32 rank, std::function<bool(u32 source)> hears);

    // Ignores repeats, messages of another generation, and messages from a rank that is not heard.
    void arrived(u32 immediate);
    // Stores the words that have changed since the last call. The payload of all arrived messages is visible before.
    void publish();

  private:
    struct Line {
        u64 next = 0;    // all messages below this number have arrived
        u64 beyond = 0;  // bit i: message next + i has arrived
        u64 total = 0;
        bool changed = false;
    };

    u8* const bank_;
    const wire::HeapLayout layout_;
    const u32 generation_;
    const observe::Accessor proxy_;
    const std::function<bool(u32)> hears_;
    std::vector<std::vector<Line>> lines_;  // by source and word; allocated for sources that are heard
    struct Place {
        u32 source;
        u32 word;
    };
    std::vector<Place> changed_;
};

}  // namespace deep_ep::host::proxy
