#include "isa.hpp"
#include "vec_scalar.hpp"
// Needs the Vec included above.
#include "kernels.inl"
#include "stream.inl"
#include "table.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kScalarKernels = make_table("scalar", stream);

}  // namespace infinity::cpu_adam
