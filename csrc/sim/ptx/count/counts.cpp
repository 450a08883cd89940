#include "sim/ptx/count/counts.h"

#include "sim/executor/executor.h"

namespace deep_ep::ptx {
namespace {

std::shared_ptr<Counts> active_now;

}  // namespace

std::shared_ptr<Counts> Counts::active() { return active_now; }

void Counts::count(What what, bool one_gpu, double nic) {
    // The observer may also be that of a watched order.
    if (active_now != nullptr && observe::observer.load() == &active_now->nics()) observe::observer.store(nullptr);
    active_now = what == What::kNothing ? nullptr : std::make_shared<Counts>(what, one_gpu, nic);
    const bool by_time = active_now != nullptr && active_now->times();
    if (by_time) observe::observer.store(&active_now->nics());
    cpu::Executor::get().schedule_by_time(by_time);
}

double Counts::latest() const {
    double latest = 0;
    for (const auto& [rank, end] : ends_) latest = std::max(latest, end);
    return latest;
}

void Counts::begin(Kernel& kernel, u64 launch, u32 rank, u32 blocks, double not_before) {
    if (launches_.count(launch) != 0) return;
    Moment begin;
    begin.cycles = std::max(not_before, ends_[rank]);
    launches_[launch] = {&kernel, kernel.count.times.size(), begin, nics_.sent(rank)};
    kernel.count.times.push_back({rank, blocks, begin.cycles, begin, {}});
}

void Counts::end(u64 launch, const Moment& moment, const Work& work) {
    const auto& [kernel, number, begin, sent] = launches_.at(launch);
    LaunchTime& time = kernel->count.times[number];
    time.end.join(moment);
    time.work.add(work);
    time.nic_bytes = nics_.sent(time.rank) - sent;
    ends_[time.rank] = std::max(ends_[time.rank], moment.cycles);
}

bool Counts::is_peers(u64 address, u32 rank) const {
    const auto next = heaps_.upper_bound(address);
    if (next == heaps_.begin()) return false;
    const Heap& heap = std::prev(next)->second;
    return address < heap.end && heap.rank != rank;
}

Counts::Kernel& Counts::of(const Module& module, const Function& entry) {
    size_t instructions = 0;
    for (const Function& function : module.functions) instructions += function.code.size();
    std::string name = entry.name;
    // A kernel of this name may belong to another module, with different code.
    for (auto found = kernels_.find(name); found != kernels_.end(); found = kernels_.find(name)) {
        if (found->second.texts.size() == instructions && found->second.target == module.target) return found->second;
        name += " of " + module.target;
    }
    Kernel& kernel = kernels_[name];
    kernel.target = module.target;
    kernel.texts.resize(instructions);
    kernel.costs.resize(instructions);
    for (const Function& function : module.functions) {
        for (const Instruction& instruction : function.code) {
            const Place& place = module.places[instruction.place];
            kernel.costs[instruction.number] = cost_of(module.opcodes[instruction.opcode]);
            kernel.texts[instruction.number] = {
                instruction.line,
                module.opcodes[instruction.opcode],
                module.describe(instruction.place),
                place.file < module.files.size() ? module.files[place.file] : std::string(),
                place.line,
                instruction.place};
        }
    }
    kernel.count.instructions.resize(kernel.texts.size());
    return kernel;
}

}  // namespace deep_ep::ptx
