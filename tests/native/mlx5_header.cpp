// Compares wire/mlx5.h with rdma-core's header: every request that kernels write, byte for byte, and every constant.
#include <endian.h>
#include <infiniband/mlx5dv.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "wire/mlx5.h"

using namespace deep_ep;
namespace mlx5 = deep_ep::wire::mlx5;

static_assert(mlx5::kBlockBytes == MLX5_SEND_WQE_BB && mlx5::kRdmaWrite == MLX5_OPCODE_RDMA_WRITE &&
              mlx5::kFetchAdd == MLX5_OPCODE_ATOMIC_FA);
static_assert(mlx5::kCompletion == MLX5_WQE_CTRL_CQ_UPDATE && mlx5::kInline == MLX5_INLINE_SEG);
static_assert(mlx5::kRequestDone == MLX5_CQE_REQ && mlx5::kRequestError == MLX5_CQE_REQ_ERR &&
              mlx5::kInvalidCqe == MLX5_CQE_INVALID);
static_assert(mlx5::kRetriesExceeded == MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR &&
              mlx5::kFlushed == MLX5_CQE_SYNDROME_WR_FLUSH_ERR &&
              mlx5::kRemoteAccess == MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR &&
              mlx5::kRemoteOperation == MLX5_CQE_SYNDROME_REMOTE_OP_ERR &&
              mlx5::kRemoteRequest == MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR &&
              mlx5::kLocalProtection == MLX5_CQE_SYNDROME_LOCAL_PROT_ERR &&
              mlx5::kLocalOperation == MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR &&
              mlx5::kLocalLength == MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
static_assert(offsetof(mlx5::DoorbellRecord, send) == MLX5_SND_DBR * 4 &&
              offsetof(mlx5::DoorbellRecord, receive) == MLX5_RCV_DBR * 4);
static_assert(offsetof(mlx5::Cqe, syndrome) == offsetof(mlx5_err_cqe, syndrome) &&
              offsetof(mlx5::Cqe, vendor) == offsetof(mlx5_err_cqe, vendor_err_synd) &&
              offsetof(mlx5::Cqe, opcode_queue) == offsetof(mlx5_cqe64, sop_drop_qpn) &&
              offsetof(mlx5::Cqe, tail) == offsetof(mlx5_cqe64, wqe_counter) &&
              sizeof(mlx5::Cqe) == sizeof(mlx5_cqe64));

namespace {

int failures = 0;

void compare(const char* what, const void* ours, const void* theirs, size_t bytes) {
    if (std::memcmp(ours, theirs, bytes) == 0) return;
    ++failures;
    std::printf("%s\n", what);
    for (const void* one : {ours, theirs}) {
        for (size_t i = 0; i < bytes; ++i)
            std::printf("%02x%s", static_cast<const u8*>(one)[i], i % 16 == 15 ? " " : "");
        std::printf("\n");
    }
}

struct Theirs {
    mlx5_wqe_ctrl_seg control;
    mlx5_wqe_raddr_seg remote;
    union {
        mlx5_wqe_data_seg data;
        mlx5_wqe_inl_data_seg inlined;
        mlx5_wqe_atomic_seg atomic;
        u8 bytes[16];
    };
    mlx5_wqe_data_seg returned;
};
static_assert(sizeof(Theirs) == 64);

void check(u64 index, u32 queue, u64 remote, u32 rkey, u64 local, u32 lkey, u32 bytes, u64 add, bool completion) {
    const u8 flags = completion ? MLX5_WQE_CTRL_CQ_UPDATE : 0;
    const auto begin = [&](Theirs& theirs, u8 opcode, u8 units) {
        std::memset(&theirs, 0, sizeof(theirs));
        mlx5dv_set_ctrl_seg(&theirs.control, static_cast<u16>(index), opcode, 0, queue, flags, units, 0, 0);
        theirs.remote.raddr = htobe64(remote);
        theirs.remote.rkey = htobe32(rkey);
    };
    mlx5::Block ours{};
    Theirs theirs;

    begin(theirs, MLX5_OPCODE_RDMA_WRITE, 3);
    mlx5dv_set_data_seg(&theirs.data, bytes, lkey, local);
    ours.control = mlx5::control(mlx5::kRdmaWrite, index, queue, mlx5::kUnitsOfWrite, completion);
    ours.remote = mlx5::remote_address(remote, mlx5::big(rkey));
    ours.data = mlx5::data(local, mlx5::big(lkey), bytes);
    compare("RDMA write", &ours, &theirs, 48);

    begin(theirs, MLX5_OPCODE_RDMA_WRITE, 3);
    theirs.inlined.byte_count = htobe32(8 | MLX5_INLINE_SEG);
    std::memcpy(theirs.bytes + 4, &add, 8);
    ours.inlined = mlx5::inline_word(add);
    compare("inline RDMA write", &ours, &theirs, 48);

    begin(theirs, MLX5_OPCODE_ATOMIC_FA, 4);
    theirs.atomic.swap_add = htobe64(add);
    mlx5dv_set_data_seg(&theirs.returned, 8, lkey, local);
    ours.control = mlx5::control(mlx5::kFetchAdd, index, queue, mlx5::kUnitsOfFetchAdd, completion);
    ours.atomic = mlx5::fetch_add(add);
    ours.returned = mlx5::data(local, mlx5::big(lkey), 8);
    compare("fetch and add", &ours, &theirs, 64);

    // The doorbell is the beginning of a control segment; the doorbell record holds its counter.
    mlx5_wqe_ctrl_seg bell;
    mlx5dv_set_ctrl_seg(&bell, static_cast<u16>(index), 0, 0, queue, 0, 0, 0, 0);
    const u64 doorbell = mlx5::doorbell(queue, index);
    compare("doorbell", &doorbell, &bell, 8);
    const u32 record = mlx5::send_counter(index), expected = htobe32(index & 0xffff);
    compare("doorbell record", &record, &expected, 4);

    mlx5_cqe64 cqe{};
    cqe.wqe_counter = htobe16(static_cast<u16>(index));
    for (const mlx5::CqeKind kind : {mlx5::kRequestDone, mlx5::kRequestError}) {
        cqe.op_own = static_cast<u8>(kind << 4);
        const u32 tail = mlx5::cqe_tail(index, kind);
        compare("completion", &tail, reinterpret_cast<u8*>(&cqe) + 60, 4);
        if (mlx5dv_get_cqe_opcode(&cqe) != mlx5::cqe_kind(tail)) ++failures;
    }
}

}  // namespace

int main() {
    check(0x0102, 0xabcd, 0x1122334455667788, 0x55667788, 0x99aabbccddeeff00, 0x11223344, 0x1000, 7, true);
    check(0xffff, 0xffffff, ~0ull, ~0u, ~0ull - 1, 1, 1u << 30, ~0ull, false);
    check(0x1ffff, 1, 16, 0, 32, 0, 16, 1ull << 15, true);
    std::printf("%s\n", failures == 0 ? "equal" : "different");
    return failures != 0;
}
