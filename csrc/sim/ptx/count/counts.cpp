#include "sim/ptx/count/counts.h"

namespace deep_ep::ptx {
namespace {

std::shared_ptr<Counts> active_now;

}  // namespace

std::shared_ptr<Counts> Counts::active() { return active_now; }

void Counts::count(bool on) { active_now = on ? std::make_shared<Counts>() : nullptr; }

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
    for (const Function& function : module.functions) {
        for (const Instruction& instruction : function.code) {
            const Place& place = module.places[instruction.place];
            kernel.texts[instruction.number] = {
                instruction.line, module.opcodes[instruction.opcode], module.describe(instruction.place),
                place.file < module.files.size() ? module.files[place.file] : std::string(), place.line};
        }
    }
    kernel.count.instructions.resize(kernel.texts.size());
    return kernel;
}

}  // namespace deep_ep::ptx
