// The kernels of a GPU's warp, compiled for the CPU, compute the scalar kernels' bits.
#define INFINITY_HOST_KERNELS
#include "vec_warp.hpp"
// These files need Vec.
#include "kernels.inl"
#include "table.inl"
// The rest.
#include <cstdio>

#include "cpu_adam_compare.hpp"

int main() {
    using namespace infinity::cpu_adam;
    KernelTable table = make_table("warp", kScalarKernels.stream);
    compare_tables(table, kScalarKernels);
    std::printf("%s: same bits as scalar\n", table.name);
    return 0;
}
