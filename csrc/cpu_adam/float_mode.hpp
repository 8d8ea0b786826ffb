// The floating-point mode in which the bits of this core are defined: round to nearest, denormals
// kept. On Linux a thread inherits its creator's mode. Without this file, a process that called
// torch.set_flush_denormal(True) would compute other bits.
#pragma once

#include <cstdint>

namespace infinity::cpu_adam {

// Puts the calling thread into the default mode until the end of the scope.
class DefaultFloatMode {
  public:
    DefaultFloatMode() : before_(read()) { write(kDefault); }
    ~DefaultFloatMode() { write(before_); }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  private:
#if defined(INFINITY_X86)
    static constexpr uint64_t kDefault = 0x1F80;  // MXCSR
    static uint64_t read() { return __builtin_ia32_stmxcsr(); }
    static void write(uint64_t mode) { __builtin_ia32_ldmxcsr(static_cast<unsigned>(mode)); }
#elif defined(INFINITY_ARM64)
    static constexpr uint64_t kDefault = 0;  // FPCR
    static uint64_t read() {
        uint64_t mode;
        __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void write(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
    static constexpr uint64_t kDefault = 0;
    static uint64_t read() { return 0; }
    static void write(uint64_t) {}
#endif

    const uint64_t before_;
};

}  // namespace infinity::cpu_adam
