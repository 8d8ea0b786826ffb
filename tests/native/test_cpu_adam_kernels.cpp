// Every instruction set that this machine runs computes the scalar kernels' bits.
#include <cstdio>

#include "cpu_adam_compare.hpp"

int main() {
    using namespace infinity::cpu_adam;
    for (const KernelTable* table : runnable_kernels()) {
        compare_tables(*table, kScalarKernels);
        std::printf("%s: same bits as scalar\n", table->name);
    }
    return 0;
}
