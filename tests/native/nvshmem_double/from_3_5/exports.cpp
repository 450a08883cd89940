// The function of NVSHMEM's host library that releases before 3.5 do not have.
#include "../calls.h"

using namespace nvshmem_double;

extern "C" [[gnu::visibility("default")]] int nvshmemx_qp_create(int count, int** handles) {
    return carry_out_on_device("nvshmemx_qp_create", [&](Pe& pe) { *handles = pe.create_queue_pairs(count); });
}
