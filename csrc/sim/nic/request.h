// A work request as the NIC understands it: decoded from a WQEBB of the send queue, with every field checked.
#pragma once

#include <string>

#include "host/network/closing.h"
#include "sim/nic/memory_table.h"

namespace deep_ep::nic {

// Fills WQEBBs that the NIC has taken, and a new send queue.
constexpr u8 kPoison = 0xcc;

// The connection that a request is for.
struct Connection {
    int rank;
    int peer;
    u32 number;
    Closing closing;
};

struct Request {
    u64 index;
    u32 opcode;
    bool completion;
    u8* target;
    const u8* source;  // of a write
    u32 bytes;
    u64 inlined;  // payload of an inline write
    u64 add;      // addend of an atomic
    u64* returned;
};

// False if a NIC would refuse the WQE or execute it wrongly, which is a bug in the code that wrote it. `wrong` names
// the field.
bool decode(const wire::mlx5::Block& block, u64 index, const Connection& connection, const MemoryTable& memory,
            Request& request, std::string& wrong);

}  // namespace deep_ep::nic
