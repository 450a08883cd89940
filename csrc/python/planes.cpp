// Makes the control plane and the networks of a Buffer over the heaps of its ranks.
#include "host/control/machines/machines_control.h"
#include "python/bindings.h"

namespace deep_ep::python {

using host::BufferOptions, host::Heap, host::Runtime;

namespace {

std::vector<uint8_t*> bases_of(const std::vector<std::shared_ptr<Heap>>& heaps) {
    std::vector<uint8_t*> bases;
    for (const auto& heap : heaps) bases.push_back(heap->base());
    return bases;
}

}  // namespace

std::vector<std::shared_ptr<uint8_t>> pages_of(const std::vector<std::shared_ptr<Heap>>& heaps) {
    std::vector<std::shared_ptr<uint8_t>> pages;
    for (const auto& heap : heaps) pages.emplace_back(heap, heap->base());
    return pages;
}

host::NearParts near_parts_of(const std::vector<std::shared_ptr<Heap>>& heaps,
                              const std::vector<std::optional<std::shared_ptr<Heap>>>& own) {
    std::vector<std::shared_ptr<Heap>> reached;
    for (const auto& heap : own) reached.push_back(heap.value_or(nullptr));
    return {heaps, std::move(reached)};
}

host::MakeControl control_over(const BufferOptions& options, std::vector<std::shared_ptr<uint8_t>> pages,
                               const host::NearParts& near, host::SharedControl::MakeTeller make_teller,
                               std::shared_ptr<host::Mesh> mesh,
                               std::function<std::unique_ptr<host::Memory>()> make_memory) {
    return [rank = options.rank, pages = std::move(pages), near, layout = Runtime::heap_layout(options),
            make_teller = std::move(make_teller), mesh = std::move(mesh),
            make_memory = std::move(make_memory)](host::Memory& memory) -> std::unique_ptr<host::ControlPlane> {
        if (!mesh) return std::make_unique<host::SharedControl>(rank, pages, near, layout, memory, make_teller);
        return std::make_unique<host::MachinesControl>(rank, pages, near, layout, memory, make_teller, mesh,
                                                       make_memory());
    };
}

host::MakeNetworks networks_over(const BufferOptions& options, const NetworkOptions& network,
                                 const std::vector<std::shared_ptr<Heap>>& heaps, Kernels kernels) {
    host::NetworkPlace place{};
    place.rank = options.rank;
    place.heaps = bases_of(heaps);
    place.layout = Runtime::heap_layout(options);
    place.kernels_on_cpu = kernels == Kernels::kOnCpu;
    place.in_process = network.in_process;
    for (uint8_t* heap : place.heaps) {
        if (options.masks_ranks) place.masked.push_back(reinterpret_cast<wire::HeapHeader*>(heap)->masked.ranks.words);
    }
    place.nic = network.nic;
    place.provider = network.provider;
    place.address = network.address;
    place.cpus = network.cpus;
    place.make_queue_pairs = network.queue_pairs;
    if (const auto mesh = network.mesh) {
        place.ended = [mesh](u32 rank) { return mesh->state(static_cast<int>(rank)) != host::Mesh::State::kHeard; };
    }
    return [place](host::Memory& memory, const std::vector<fabric::Route>& routes, uint32_t generation) {
        host::NetworkPlace here = place;
        here.memory = &memory;
        here.generation = generation;
        return host::Networks(here, routes);
    };
}

}  // namespace deep_ep::python
