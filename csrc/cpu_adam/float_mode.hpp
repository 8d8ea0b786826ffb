// The floating-point mode that the kernels' bits are defined in: round to nearest, denormals kept.
#pragma once

namespace infinity::cpu_adam {

// Puts the calling thread into that mode. A thread inherits its creator's mode on Linux, so a
// process that called torch.set_flush_denormal(True) would otherwise compute other bits.
inline void set_default_float_mode() {
#if defined(INFINITY_X86)
    __builtin_ia32_ldmxcsr(0x1F80);
#elif defined(INFINITY_ARM64)
    __asm__ volatile("msr fpcr, %0" : : "r"(0UL));
#endif
}

}  // namespace infinity::cpu_adam
