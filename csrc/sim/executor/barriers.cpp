// Barriers of a block, and the effect of a thread's exit on threads that wait for it.
#include "sim/executor/misuse.h"
#include "sim/executor/scheduler.h"

namespace deep_ep::cpu {

namespace {

// All have arrived: every thread continues, in order of arrival.
void open_barrier(Barrier& barrier) {
    Fiber* in_order = nullptr;
    for (Fiber* fiber = barrier.waiting; fiber;) {
        Fiber* const next = fiber->next;
        fiber->next = in_order;
        in_order = fiber;
        fiber = next;
    }
    Scheduler::get().make_ready([&](auto push) {
        for (Fiber* fiber = in_order; fiber;) {
            Fiber* const next = fiber->next;
            push(fiber);
            fiber = next;
        }
    });
    barrier.waiting = nullptr;
    barrier.arrived = 0;
    barrier.rounds++;
    Scheduler::get().barriers++;
}

void check_barrier(const Block& block, const Barrier& barrier, unsigned id, unsigned threads, Site site) {
    if (current->agent) misuse(site, "an agent joined a barrier");
    if (id >= Block::kBarriers) misuse(site, "there is no barrier %u", id);
    if (threads == 0 && id != 0) misuse(site, "a named barrier without a count");
    if (threads % kWarpWidth != 0) misuse(site, "barrier count %u is not a multiple of the warp width", threads);
    if (threads > block.grid->launch.threads)
        misuse(site, "barrier count %u is more than the block's %u threads", threads, block.grid->launch.threads);
    if (barrier.arrived && barrier.expected != threads)
        misuse(site, "barrier %u joined with count %u, but opened with count %u at %s:%d", id, threads,
               barrier.expected, barrier.opened_by.file, barrier.opened_by.line);
}

}  // namespace

bool barrier(unsigned id, unsigned threads, bool value, Site site) {
    Scheduler& scheduler = Scheduler::get();
    Fiber* self = current;
    Block& block = *self->block;
    Barrier& barrier = block.barriers[id % Block::kBarriers];
    check_barrier(block, barrier, id, threads, site);
    self->what = threads ? "barrier_or" : "__syncthreads";
    self->site = site;

    const unsigned parity = barrier.rounds % 2;
    tsan::SyncPoint& point = barrier.sync[parity];
    if (barrier.arrived == 0) {
        barrier.any[parity] = false;
        barrier.expected = threads;
        barrier.opened_by = site;
        point.open();
    } else {
        point.release();
    }
    barrier.any[parity] = barrier.any[parity] || value;
    if (++barrier.arrived == (threads ? threads : block.live)) {
        open_barrier(barrier);
        if (scheduler.ready().random()) yield(site.file, site.line);
    } else {
        self->next = barrier.waiting;
        barrier.waiting = self;
        scheduler.suspend(State::kBarrier);
    }
    point.acquire();
    return barrier.any[parity];
}

void Scheduler::retire(Fiber* fiber) {
    if (fiber->agent) {
        fiber->agent->done = true;
        news_ = true;
        return;
    }
    Warp& warp = *fiber->warp;
    for (unsigned i = 0; i < warp.pending_count; i++) {
        if ((warp.pending[i].mask >> fiber->lane) & 1)
            return fail(false, "a thread exits while lanes of its warp wait for it in a collective at " +
                                   to_string(warp.pending[i].opened_by) + " (" + describe(*fiber) + ")");
    }
    warp.live &= ~(1u << fiber->lane);
    Block& block = *fiber->block;
    block.live--;
    Barrier& all = block.barriers[0];
    if (all.arrived && all.arrived == block.live) open_barrier(all);
    if (block.live != 0) return;
    Grid& grid = *block.grid;
    if (--grid.live_blocks != 0) return;
    grid.stream->finish();
    kernels_--;
    fibers_ -= grid.size();
    news_ = true;
    if (!grid.stream->pending.empty()) to_start_.push_back(grid.stream);
}

}  // namespace deep_ep::cpu
