// The compiled instruction sets, the ones that this CPU can run, and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "formats.hpp"

namespace infinity::cpu_adam {

extern const KernelTable kScalarKernels;
#if defined(INFINITY_X86)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#elif defined(INFINITY_ARM64)
extern const KernelTable kNeonKernels;
#endif

// The compiled kernels that this CPU and operating system can run, best first. The last one is
// "scalar".
const std::vector<const KernelTable*>& runnable_kernels();

// The kernels with that name. An empty name stands for $INFINITY_ISA or, if that is not set, for
// the best. Throws ConfigError for an unknown name and for kernels that this machine cannot run.
const KernelTable& select_kernels(const std::string& name = "");

}  // namespace infinity::cpu_adam
