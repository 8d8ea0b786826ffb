#include "isa.hpp"
#include "vec_avx512.hpp"
// Needs the Vec included above.
#include "kernels.inl"
#include "stream.inl"
#include "table.inl"

namespace infinity::cpu_adam {

constinit const KernelTable kAvx512Kernels = make_table("avx512", stream);

}  // namespace infinity::cpu_adam
