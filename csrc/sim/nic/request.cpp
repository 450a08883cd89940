#include "sim/nic/request.h"

#include <cstring>

namespace deep_ep::nic {
namespace {

namespace mlx5 = wire::mlx5;

constexpr u32 kNeverWritten = kPoison << 8 | kPoison;  // the index in a poisoned WQEBB

bool refuse(std::string& wrong, const std::string& field, u64 is, u64 expected) {
    wrong = field + " is " + std::to_string(is) + ", expected " + std::to_string(expected);
    return false;
}

bool check_control(const mlx5::Control& control, u64 index, const Connection& connection, std::string& wrong) {
    const u32 first = mlx5::big(control.opcode), written = first >> 8 & 0xffff;
    if (written != (index & 0xffff)) {
        refuse(wrong, "index", written, index & 0xffff);
        if (written == kNeverWritten) wrong += ": the request has not been written, although its doorbell has rung";
        return false;
    }
    if (first >> 24 != 0) return refuse(wrong, "opcode modifier", first >> 24, 0);
    const u32 queue = mlx5::big(control.queue) >> 8;
    if (queue != connection.number) return refuse(wrong, "queue pair number", queue, connection.number);
    const u32 flags = mlx5::big(control.flags);
    if ((flags & ~mlx5::kCompletionMask) != 0) {
        return refuse(wrong, "signature, stream, fence and solicited bits", flags, 0);
    }
    const u32 completion = flags & mlx5::kCompletionMask;
    if (completion != 0 && completion != mlx5::kCompletion) {
        return refuse(wrong, "completion bits", completion, mlx5::kCompletion);
    }
    if (control.immediate != 0) return refuse(wrong, "immediate", mlx5::big(control.immediate), 0);
    return true;
}

bool check_units(const mlx5::Control& control, u32 expected, std::string& wrong) {
    const u32 units = mlx5::big(control.queue) & 0xff;
    return units == expected || refuse(wrong, "units", units, expected);
}

bool decode_write(const mlx5::Block& block, const Connection& connection, const MemoryTable& memory, Request& request,
                  std::string& wrong) {
    if (!check_units(block.control, mlx5::kUnitsOfWrite, wrong)) return false;
    const u32 first = mlx5::big(block.data.bytes);
    if ((first & mlx5::kInline) != 0) {
        request.bytes = first & ~mlx5::kInline;
        if (request.bytes != sizeof(u64)) return refuse(wrong, "inline bytes", request.bytes, sizeof(u64));
        std::memcpy(&request.inlined, block.inlined.payload, sizeof(u64));
        request.source = nullptr;
        return true;
    }
    request.bytes = first;
    if (first == 0 || first > mlx5::kMaxMessageBytes) return refuse(wrong, "bytes", first, mlx5::kMaxMessageBytes);
    request.source =
        memory.find(mlx5::big(block.data.key), connection.rank, mlx5::big(block.data.address), first, "local", wrong);
    return request.source != nullptr;
}

bool decode_atomic(const mlx5::Block& block, const Connection& connection, const MemoryTable& memory, Request& request,
                   std::string& wrong) {
    if (!check_units(block.control, mlx5::kUnitsOfFetchAdd, wrong)) return false;
    request.bytes = sizeof(u64);
    request.add = mlx5::big(block.atomic.add);
    const u64 address = mlx5::big(block.remote.address);
    if (address % sizeof(u64) != 0) return refuse(wrong, "remote address modulo 8", address % sizeof(u64), 0);
    const u32 bytes = mlx5::big(block.returned.bytes);
    if (bytes != sizeof(u64)) return refuse(wrong, "bytes of the old value", bytes, sizeof(u64));
    u8* returned = memory.find(mlx5::big(block.returned.key), connection.rank, mlx5::big(block.returned.address), bytes,
                               "local", wrong);
    request.returned = reinterpret_cast<u64*>(returned);
    return returned != nullptr;
}

}  // namespace

bool decode(const wire::mlx5::Block& block, u64 index, const Connection& connection, const MemoryTable& memory,
            Request& request, std::string& wrong) {
    if (!check_control(block.control, index, connection, wrong)) return false;
    request = {};
    request.index = index;
    request.opcode = mlx5::big(block.control.opcode) & 0xff;
    request.completion = (mlx5::big(block.control.flags) & mlx5::kCompletionMask) != 0;
    bool understood = false;
    if (request.opcode == mlx5::kRdmaWrite) {
        understood = decode_write(block, connection, memory, request, wrong);
    } else if (request.opcode == mlx5::kFetchAdd) {
        understood = decode_atomic(block, connection, memory, request, wrong);
    } else {
        refuse(wrong, "opcode", request.opcode, mlx5::kRdmaWrite);
    }
    if (!understood) return false;
    if (block.remote.reserved != 0) return refuse(wrong, "reserved bits of the remote address", 1, 0);
    request.target = memory.find(mlx5::big(block.remote.key), connection.peer, mlx5::big(block.remote.address),
                                 request.bytes, "remote", wrong);
    return request.target != nullptr;
}

}  // namespace deep_ep::nic
