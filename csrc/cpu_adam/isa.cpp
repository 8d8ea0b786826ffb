#include "isa.hpp"

#include <cstdint>
#include <cstdlib>

#include "errors.hpp"
#if defined(INFINITY_X86)
#include <cpuid.h>
#endif

namespace infinity::cpu_adam {
namespace {

#if defined(INFINITY_X86)
struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf) {
    Registers r;
    if (__get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d) == 0) return {};
    return r;
}

// The register files that the operating system saves at a context switch (XCR0).
uint32_t saved_state() {
    if ((cpuid(1).c & bit_OSXSAVE) == 0) return 0;
    uint32_t low = 0;
    uint32_t high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool has(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

bool runs_avx2() {
    constexpr uint32_t kYmm = 0x6;
    return has(saved_state(), kYmm) && has(cpuid(1).c, bit_AVX | bit_FMA | bit_F16C) &&
           has(cpuid(7).b, bit_AVX2);
}

bool runs_avx512() {
    constexpr uint32_t kZmm = 0xE6;
    return runs_avx2() && has(saved_state(), kZmm) &&
           has(cpuid(7).b, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
}
#endif

std::vector<const KernelTable*> find_runnable() {
    std::vector<const KernelTable*> tables;
#if defined(INFINITY_X86)
    if (runs_avx512()) tables.push_back(&kAvx512Kernels);
    if (runs_avx2()) tables.push_back(&kAvx2Kernels);
#elif defined(INFINITY_ARM64)
    tables.push_back(&kNeonKernels);
#endif
    tables.push_back(&kScalarKernels);
    return tables;
}

}  // namespace

const std::vector<const KernelTable*>& runnable_kernels() {
    static const std::vector<const KernelTable*> tables = find_runnable();
    return tables;
}

const KernelTable& select_kernels(const std::string& name) {
    const char* forced = name.empty() ? std::getenv("INFINITY_ISA") : name.c_str();
    if (forced == nullptr || *forced == '\0') return *runnable_kernels().front();
    std::string names;
    for (const KernelTable* table : runnable_kernels()) {
        if (table->name == std::string(forced)) return *table;
        names += (names.empty() ? "" : ", ") + std::string(table->name);
    }
    throw ConfigError("The instruction set '" + std::string(forced) + "' " +
                          (name.empty() ? "in INFINITY_ISA " : "") +
                          "is unknown, or this machine cannot run it.",
                      "Use one of: " + names + ".");
}

}  // namespace infinity::cpu_adam
