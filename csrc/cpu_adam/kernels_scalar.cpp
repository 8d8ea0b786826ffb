#include "isa.hpp"
#include "vec_scalar.hpp"
// Needs Vec.
#include "kernels.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kScalarKernels = make_table("scalar");

}  // namespace infinity::cpu_adam
