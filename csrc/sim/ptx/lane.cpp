#include "sim/ptx/lane.h"

#include "sim/executor/builtin_variables.h"
#include "sim/executor/device_calls.h"
#include "sim/ptx/block.h"
#include "sim/ptx/order/others.h"

namespace deep_ep::ptx {
namespace {

constexpr u32 kWarpLanes = 32;
constexpr size_t kMaxFrames = 64;

}  // namespace

Lane::Lane(const Image& image, const Function& entry, Block& block, const void* arguments)
    : image_(image), block_(block), count_(block.count_of(threadIdx.x)) {
    if (order_) {
        const auto held = hold();
        actor_ = order_->begin(block.place.rank, block.place.launch, block.place.threads, block.place.number);
    }
    enter(entry, nullptr);
    for (const Parameter& parameter : entry.parameters) {
        std::memcpy(parameters_.data() + parameter.offset, static_cast<const u8*>(arguments) + parameter.offset,
                    parameter.bytes);
    }
}

Lane::~Lane() {
    if (!actor_) return;
    const auto held = hold();
    order_->end(*actor_);
}

void Lane::run() {
    while (!frames_.empty()) {
        const std::vector<Instruction>& code = function().code;
        if (next_ >= code.size()) fail("it runs past the end of the function");
        const Instruction& instruction = code[next_++];
        if (instruction.guard.kind == OperandKind::kNothing || holds(instruction.guard)) {
            if (__builtin_expect(count_ != nullptr, 0)) count(instruction);
            instruction.handler(*this, instruction);
        } else if (LaneTime* const mine = time()) {
            mine->skip(instruction, frames_.back().slots);
        }
    }
}

void Lane::count(const Instruction& instruction) {
    // The last operand of a warp collective is its mask.
    const bool all = instruction.meets != Meets::kWarp || get<u32>(instruction.operands[instruction.count - 1]) == ~0u;
    count_->execute(instruction, frames_.back().slots, all);
}

void Lane::count_access(const u8* memory, u64 bytes, Access access) {
    if (!count_) return;
    const size_t registers = frames_.back().slots;
    if (is_own(memory)) {
        if (time() != nullptr && access == Access::kRead) time()->load_own(here(), registers);
        return;
    }
    const u64 address = reinterpret_cast<u64>(memory);
    const bool is_shared = block_.is_shared(memory);
    using Kind = TimedAccess::Kind;
    const Kind kind = access == Access::kRead ? Kind::kLoad : access == Access::kWrite ? Kind::kStore : Kind::kUpdate;
    count_->access(here(), registers,
                   {address, static_cast<u32>(bytes), is_shared, !is_shared && block_.is_peers(address)}, kind);
}

u64 Lane::count_bulk_load(const u8* source, u64 bytes, Moment& arrives) {
    if (!count_) return 0;
    turn_by_time();
    const u64 address = reinterpret_cast<u64>(source);
    const bool is_peers = block_.is_peers(address);
    count_->access({address, static_cast<u32>(bytes), false, is_peers});
    if (LaneTime* const mine = time()) arrives.join(mine->bulk_load(address, bytes, is_peers));
    return count_->add(here(), bytes);
}

void Lane::count_bulk_store(const u8* target, u64 bytes) {
    if (!count_) return;
    turn_by_time();
    const u64 address = reinterpret_cast<u64>(target);
    const bool is_peers = block_.is_peers(address);
    count_->access({address, static_cast<u32>(bytes), false, is_peers});
    if (LaneTime* const mine = time()) mine->bulk_store(address, bytes, is_peers);
}

void Lane::count_load(const u8* memory, u64 bytes) {
    if (!count_ || is_own(memory) || block_.is_shared(memory)) return;
    count_->load(here(), frames_.back().slots, bytes);
}

void Lane::align(const Instruction& instruction) {
    if (!block_.is_aligned(threadIdx.x / kWarpLanes, aligned_++, instruction)) {
        fail("threads of a warp come to different aligned barriers");
    }
}

void Lane::enter(const Function& function, const Instruction* called_by) {
    if (frames_.size() == kMaxFrames) fail("calls are nested too deeply");
    frames_.push_back({&function, next_, called_by, registers_.size(), parameters_.size(), local_.size()});
    next_ = 0;
    registers_.resize(registers_.size() + function.slots);
    written_.resize(registers_.size(), 0);
    parameters_.resize((parameters_.size() + function.parameter_bytes + 15) / 16 * 16);
    local_.resize((local_.size() + function.local_bytes + 15) / 16 * 16);
}

void Lane::call(const Instruction& instruction) {
    const Operand* const operands = instruction.operands;
    const Function& called = image_.module().functions[operands[0].index];
    const Operand* const given = operands + 1 + operands[0].value;
    const size_t from = frames_.back().parameters;
    enter(called, &instruction);
    if (given + called.parameters.size() != operands + instruction.count)
        fail("a call passes the wrong number of parameters");
    const size_t to = frames_.back().parameters;
    for (size_t i = 0; i < called.parameters.size(); ++i) {
        const Parameter& parameter = called.parameters[i];
        std::memcpy(parameters_.data() + to + parameter.offset,
                    parameters_.data() + from + static_cast<u64>(given[i].value), parameter.bytes);
    }
}

void Lane::leave() {
    const Frame left = frames_.back();
    if (frames_.size() == 1 && !stores_.empty()) fail("it ends before its bulk copies have been waited for");
    frames_.pop_back();
    if (frames_.empty()) return;
    const size_t to = frames_.back().parameters;
    for (size_t i = 0; i < left.function->results.size(); ++i) {
        const Parameter& result = left.function->results[i];
        if (static_cast<i64>(i) >= left.called_by->operands[0].value) break;  // the caller takes fewer results
        std::memcpy(parameters_.data() + to + static_cast<u64>(left.called_by->operands[1 + i].value),
                    parameters_.data() + left.parameters + result.offset, result.bytes);
    }
    next_ = left.next;
    registers_.resize(left.slots);
    written_.resize(left.slots);
    parameters_.resize(left.parameters);
    local_.resize(left.local);
}

u64 Lane::value_of(const Operand& operand) const {
    switch (operand.kind) {
        case OperandKind::kRegister:
            return read(operand.index);
        case OperandKind::kImmediate:
            return static_cast<u64>(operand.value);
        case OperandKind::kSpecial:
            return special(static_cast<SpecialRegister>(operand.index));
        case OperandKind::kVariable:
            return image_.address(operand.index) + static_cast<u64>(operand.value);
        case OperandKind::kLocal:
            return frames_.back().local + static_cast<u64>(operand.value);
        case OperandKind::kParam:
            return frames_.back().parameters + static_cast<u64>(operand.value);
        case OperandKind::kAddress:
            return read(operand.index) + static_cast<u64>(operand.value);
        case OperandKind::kLabel:
        case OperandKind::kFunction:
        case OperandKind::kNothing:
            break;
    }
    fail("an operand has no value");
}

u64 Lane::special(SpecialRegister which) const {
    switch (which) {
        case SpecialRegister::kThread:
            return threadIdx.x;
        case SpecialRegister::kThreads:
            return blockDim.x;
        case SpecialRegister::kBlock:
            return blockIdx.x;
        case SpecialRegister::kBlockY:
            return block_.place.row;
        case SpecialRegister::kBlocks:
            return gridDim.x;
        case SpecialRegister::kLane:
            return threadIdx.x % kWarpLanes;
        case SpecialRegister::kGlobalTimer:
            return cpu::now_ns();
    }
    fail("unknown special register");
}

u64 Lane::generic(u64 address, Space space) const {
    switch (space) {
        case Space::kShared:
            return kSharedWindow + address;
        case Space::kLocal:
            return kLocalWindow + address;
        case Space::kParam:
            return kParamWindow + address;
        case Space::kGeneric:
        case Space::kGlobal:
        case Space::kConst:
            break;
    }
    return address;
}

u8* Lane::reach(const Operand& operand, Space space, u64 bytes, Access access) {
    u8* const memory = locate(operand, space, bytes, access);
    if (count_) count_access(memory, bytes, access);
    if (!actor_ || is_own(memory)) return memory;
    const auto held = hold();
    const bool writes = access != Access::kRead;
    check(shadow_of(memory).note(writes, made(memory, bytes, Scope::kNone), actor_->clock), writes);
    return memory;
}

u8* Lane::locate(const Operand& operand, Space space, u64 bytes, Access access) {
    u64 address = value_of(operand);
    if (address % bytes != 0) {
        fail("address " + std::to_string(address) + " is not a multiple of " + std::to_string(bytes));
    }
    if (space == Space::kGeneric) {
        const u64 window = address & kWindowMask;
        address &= ~kWindowMask;
        space = window == kSharedWindow  ? Space::kShared
                : window == kLocalWindow ? Space::kLocal
                : window == kParamWindow ? Space::kParam
                                         : Space::kGlobal;
    }
    switch (space) {
        case Space::kShared:
            return shared(address, bytes, access);
        case Space::kLocal:
            return part(local_, address, bytes, "local memory");
        case Space::kParam:
            return part(parameters_, address, bytes, "parameters");
        case Space::kGeneric:
        case Space::kGlobal:
        case Space::kConst:
            break;
    }
    if (address < 4096) fail("address " + std::to_string(address) + " is accessed");
    return reinterpret_cast<u8*>(address);
}

u8* Lane::part(std::vector<u8>& memory, u64 offset, u64 bytes, const char* what) {
    if (offset > memory.size() || bytes > memory.size() - offset) {
        fail("byte " + std::to_string(offset) + " of " + what + " is accessed, of " + std::to_string(memory.size()));
    }
    return memory.data() + offset;
}

u8* Lane::shared(u64 offset, u64 bytes, Access access) {
    std::vector<u8>& written = block_.written();
    if (offset > written.size() || bytes > written.size() - offset) {
        fail("byte " + std::to_string(offset) + " of shared memory is accessed, of " + std::to_string(written.size()));
    }
    u8* const begin = written.data() + offset;
    if (access == Access::kWrite) {
        std::memset(begin, 1, bytes);
    } else if (std::memchr(begin, 0, bytes) != nullptr) {
        fail("byte " + std::to_string(offset) + " of shared memory is read but was never written");
    }
    return block_.shared() + offset;
}

cpu::Site Lane::site() const {
    const Module& module = image_.module();
    const Place& place = module.places[here().place];
    return {place.file < module.files.size() ? module.files[place.file].c_str() : "?", static_cast<int>(place.line)};
}

// --- the order of accesses --------------------------------------------------------------------------

BarrierClocks& Lane::clocks_of(u64 barrier) { return block_.barrier_clocks[barrier]; }
BarrierMoments& Lane::moments_of(u64 barrier) { return block_.barrier_moments[barrier]; }

Made Lane::made(const void* memory, u64 bytes, Scope scope) const {
    return {actor_->now(), actor_->rank,     actor_->block, scope, reinterpret_cast<u64>(memory),
            bytes,         &image_.module(), here().place,  {}};
}

bool Lane::is_own(const u8* memory) const {
    const auto within = [&](const std::vector<u8>& own) {
        return memory >= own.data() && memory < own.data() + own.size();
    };
    return within(local_) || within(parameters_);
}

Shadow& Lane::shadow_of(const void* memory) {
    if (block_.is_shared(memory)) return block_.shadow;
    return order_->global(reinterpret_cast<u64>(memory), block_.place.rank);
}

void Lane::note_copy(const u8* memory, u64 bytes, bool writes, const Epoch& moment, const Clock& after, Scope scope) {
    if (!actor_) return;
    const auto held = hold();
    Made access = made(memory, bytes, scope);
    access.moment = moment;
    check(shadow_of(memory).note(writes, access, after), writes);
}

void Lane::note_barrier(const u8* memory, bool writes) {
    if (!actor_) return;
    const auto held = hold();
    check(shadow_of(memory).note(writes, made(memory, sizeof(u64), Scope::kBlock), actor_->clock), writes);
}

void Lane::check(const Made* earlier, bool writes) const {
    if (earlier == nullptr) return;
    fail(std::string("data race: it ") + (writes ? "writes" : "reads") + " memory accessed by " + describe(*earlier));
}

u64 Lane::note_load(const void* word, u64 bytes, u64 newest, const Strong& strong, bool may_be_old) {
    const Made access = made(word, bytes, strong.scope);
    Shadow& shadow = shadow_of(word);
    check(shadow.note(false, access, actor_->clock), false);
    cpu::Random* const random = may_be_old ? order_->random() : nullptr;
    return shadow.load(newest, strong.acquires, access, actor_->clock, actor_->clock, random);
}

std::vector<Word::Released> Lane::releases_of(const Made& access, bool releases) const {
    std::vector<Word::Released> all;
    if (releases) all.push_back({actor_->clock, access});
    for (const Scope fenced : {Scope::kBlock, Scope::kDevice, Scope::kSystem}) {
        const Clock& clock = actor_->fenced[static_cast<u32>(fenced)];
        if (clock.time_of(actor_->number) == 0) continue;  // no fence yet
        Made by = access;
        by.scope = std::min(access.scope, fenced);
        all.push_back({clock, by});
    }
    return all;
}

void Lane::note_store(const void* word, u64 bytes, const Word::Stored& stored, const Strong& strong) {
    const Made access = made(word, bytes, strong.scope);
    Shadow& shadow = shadow_of(word);
    check(shadow.note(true, access, actor_->clock), true);
    shadow.store(stored, access, releases_of(access, strong.releases));
    actor_->tick();
}

void Lane::unwritten() const { fail("a register is read but was never written"); }

void Lane::fail(const std::string& why) const {
    std::string text = why;
    if (!frames_.empty() && next_ != 0) {
        const Instruction& instruction = here();
        const Module& module = image_.module();
        text += " (" + module.opcodes[instruction.opcode] + ", line " + std::to_string(instruction.line) +
                " of the PTX, " + module.describe(instruction.place) + ")";
    }
    throw PtxError(text);
}

}  // namespace deep_ep::ptx
