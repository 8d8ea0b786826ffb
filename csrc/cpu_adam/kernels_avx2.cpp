#include "isa.hpp"
#include "vec_avx2.hpp"
// Needs the Vec included above.
#include "kernels.inl"
#include "stream.inl"
#include "table.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kAvx2Kernels = make_table("avx2", stream);

}  // namespace infinity::cpu_adam
