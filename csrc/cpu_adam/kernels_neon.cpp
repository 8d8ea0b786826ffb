#include "isa.hpp"
#include "vec_neon.hpp"
// Needs Vec.
#include "kernels.inl"
#include "stream.inl"
#include "table.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kNeonKernels = make_table("neon", stream);

}  // namespace infinity::cpu_adam
