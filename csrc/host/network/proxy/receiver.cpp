#include "host/network/proxy/receiver.h"

#include "observe/timeline.h"

namespace deep_ep::host::proxy {

using namespace wire::proxy;
namespace timeline = observe::timeline;

Receiver::Receiver(u8* bank, const wire::HeapLayout& layout, u32 generation, u32 rank, std::function<bool(u32)> hears)
    : bank_(bank),
      layout_(layout),
      generation_(generation),
      proxy_(observe::proxy(rank)),
      hears_(std::move(hears)),
      lines_(layout.ranks) {}

void Receiver::arrived(u32 immediate) {
    const Immediate said = unpack(immediate);
    const bool ours = said.source < layout_.ranks && said.word < layout_.regions * wire::kOfRanks &&
                      said.generation == generation_ % 4 && hears_(said.source);
    if (!ours) return;
    std::vector<Line>& lines = lines_[said.source];
    if (lines.empty()) lines.resize(kWords);
    Line& line = lines[said.word];
    const u32 ahead = (said.sequence - static_cast<u32>(line.next)) & (kSequences - 1);
    if (ahead >= kWindow || (line.beyond >> ahead & 1) != 0) return;
    line.beyond |= u64{1} << ahead;
    while ((line.beyond & 1) != 0) {
        line.beyond >>= 1;
        ++line.next;
    }
    line.total += share(said.pieces);
    if (!line.changed) changed_.push_back({said.source, said.word});
    line.changed = true;
}

void Receiver::publish() {
    for (const Place& place : changed_) {
        Line& line = lines_[place.source][place.word];
        line.changed = false;
        const u32 region = place.word / wire::kOfRanks, kind = place.word % wire::kOfRanks;
        // A kernel of this rank that acquires the word at system scope sees the payload of all messages that the total
        // counts. This holds on a GPU too, without a flush of the NIC's writes: payload and word are both in host
        // memory, and data that the network reports as arrived there is visible to all. It would not hold for GPU
        // memory, which the NIC's writes reach by another path than its completions. Litmus: mp_release_acquire_sys.
        auto* const word = reinterpret_cast<u64*>(bank_ + layout_.word_in_bank(region, kind, place.source));
        const u64 now = timeline::now();
        observe::store_release(proxy_, word, line.total);
        if (now != 0) {
            const i32 rank = static_cast<i32>(proxy_.rank);
            timeline::add(
                {timeline::Kind::kSignal, rank, rank, place.source, 0, 0, now, now, line.total, word, "arrival"});
        }
    }
    changed_.clear();
}

}  // namespace deep_ep::host::proxy
