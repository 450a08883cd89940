// Warp collectives: shuffles, votes and __syncwarp, of which only the last orders memory.
#include "sim/executor/misuse.h"
#include "sim/executor/scheduler.h"

namespace deep_ep::cpu {

namespace {

const char* name_of(Collective operation) {
    switch (operation) {
        case Collective::kSyncWarp:
            return "__syncwarp";
        case Collective::kShuffle:
            return "__shfl_sync";
        case Collective::kBallot:
            return "__ballot_sync";
        case Collective::kAny:
            return "__any_sync";
        case Collective::kAll:
            return "__all_sync";
    }
    return "?";
}

template <class Visit>
void for_each_lane(u32 mask, Visit visit) {
    for (; mask; mask &= mask - 1) visit(static_cast<unsigned>(__builtin_ctz(mask)));
}

// Returns the collective that the caller joins. Collectives of disjoint sets of lanes may be open at the same time.
PendingCollective& join(Warp& warp, u32 mask, Collective operation, Site site) {
    const u32 self = 1u << current->lane;
    if (current->agent) misuse(site, "an agent joined a warp collective");
    if (!(mask & self)) misuse(site, "the calling lane is not in the mask of its collective");
    if (mask & ~warp.live) misuse(site, "a collective's mask names a lane that has exited or does not exist");
    PendingCollective* found = nullptr;
    for (unsigned i = 0; i < warp.pending_count; i++) {
        PendingCollective& pending = warp.pending[i];
        if (pending.mask == mask) {
            found = &pending;
        } else if ((pending.mask & self) && (pending.arrived & mask)) {
            misuse(site, "lanes of one warp wait for each other with different masks, the others at %s:%d",
                   pending.opened_by.file, pending.opened_by.line);
        }
    }
    if (!found) {
        found = &warp.pending[warp.pending_count++];
        *found = {mask, 0, operation, site};
    }
    if (found->operation != operation)
        misuse(site, "lanes of one warp meet in %s and %s, the others at %s:%d", name_of(operation),
               name_of(found->operation), found->opened_by.file, found->opened_by.line);
    return *found;
}

// Called when all lanes of the mask have arrived in the same operation.
void compute_results(Warp& warp, u32 mask, Collective operation, Site site) {
    u32 votes = 0;
    for_each_lane(mask, [&](unsigned lane) { votes |= u32{warp.values[lane] != 0} << lane; });
    for_each_lane(mask, [&](unsigned lane) {
        switch (operation) {
            case Collective::kSyncWarp:
                break;
            case Collective::kShuffle:
                if (!(mask >> warp.sources[lane] & 1)) misuse(site, "__shfl_sync reads from a lane outside its mask");
                warp.results[lane] = warp.values[warp.sources[lane]];
                break;
            case Collective::kBallot:
                warp.results[lane] = votes;
                break;
            case Collective::kAny:
                warp.results[lane] = votes != 0;
                break;
            case Collective::kAll:
                warp.results[lane] = votes == mask;
                break;
        }
    });
}

}  // namespace

u64 collective(Collective operation, u32 mask, u64 value, unsigned source, Site site) {
    Scheduler& scheduler = Scheduler::get();
    Fiber* self = current;
    Warp& warp = *self->warp;
    const u32 bit = 1u << self->lane;
    self->what = name_of(operation);
    self->site = site;
    PendingCollective& pending = join(warp, mask, operation, site);
    warp.values[self->lane] = value;
    warp.sources[self->lane] = static_cast<u8>(source);

    tsan::SyncPoint* point = nullptr;
    if (kTsan && operation == Collective::kSyncWarp) {
        const unsigned leader = __builtin_ctz(mask);
        point = &warp.sync[leader][warp.rounds[leader] % 2];
        pending.arrived ? point->release() : point->open();
    }
    pending.arrived |= bit;
    if (pending.arrived == mask) {
        pending = warp.pending[--warp.pending_count];
        compute_results(warp, mask, operation, site);
        warp.rounds[__builtin_ctz(mask)]++;
        scheduler.collectives++;
        scheduler.make_ready(
            [&](auto push) { for_each_lane(mask & ~bit, [&](unsigned lane) { push(warp.lanes[lane]); }); });
        if (scheduler.ready().random()) yield(site.file, site.line);
    } else {
        scheduler.suspend(State::kCollective);
    }
    if (point) point->acquire();
    return warp.results[self->lane];
}

}  // namespace deep_ep::cpu
