#include "implementations.hpp"

#if defined(INFINITY_X86)
#include <cpuid.h>
#elif defined(INFINITY_ARM64)
#include <sys/auxv.h>
#endif

namespace infinity::checksum {
namespace {

#if defined(INFINITY_X86)
bool runs_sse42() {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_SSE4_2) != 0;
}
#elif defined(INFINITY_ARM64)
bool runs_armv8_crc() {
    constexpr unsigned long kCrc32 = 1UL << 7;  // HWCAP_CRC32
    return (getauxval(AT_HWCAP) & kCrc32) != 0;
}
#endif

std::vector<const Implementation*> find_runnable() {
    std::vector<const Implementation*> found;
#if defined(INFINITY_X86)
    if (runs_sse42()) found.push_back(&kSse42);
#elif defined(INFINITY_ARM64)
    if (runs_armv8_crc()) found.push_back(&kArmv8);
#endif
    found.push_back(&kTable);
    return found;
}

}  // namespace

const std::vector<const Implementation*>& runnable_implementations() {
    static const std::vector<const Implementation*> found = find_runnable();
    return found;
}

}  // namespace infinity::checksum
