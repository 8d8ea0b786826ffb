#include "isa.hpp"
#include "vec_neon.hpp"
// Needs Vec.
#include "kernels.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kNeonKernels = make_table("neon");

}  // namespace infinity::cpu_adam
