#include "isa.hpp"
#include "vec_avx512.hpp"
// Needs Vec.
#include "kernels.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kAvx512Kernels = make_table("avx512");

}  // namespace infinity::cpu_adam
