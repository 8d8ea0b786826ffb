#include "isa.hpp"
#include "vec_neon.hpp"
// Needs the Vec included above.
#include "kernels.inl"
#include "stream.inl"
#include "table.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kNeonKernels = make_table("neon", stream);

}  // namespace infinity::cpu_adam
