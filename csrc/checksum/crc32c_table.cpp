// CRC32C by tables, for CPUs without an instruction: slicing-by-8 (M. Kounavis and F. Berry, "A
// Systematic Approach to Building High Performance Software-Based CRC Generators", 2005).
#include <array>

#include "lanes.inl"

namespace infinity::checksum {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b] is what byte b changes in the CRC when k bytes follow it.
constexpr Tables make_tables() {
    constexpr uint32_t kPolynomial = 0x82F63B78;  // Castagnoli's, bits reflected
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
        tables[0][byte] = crc;
    }
    for (size_t k = 1; k < 8; ++k) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}

constexpr Tables kTables = make_tables();

struct TableStep {
    static uint64_t word(uint64_t crc, uint64_t word) {
        const uint64_t mixed = crc ^ word;
        uint32_t next = 0;
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; ++i) next ^= kTables[7 - i][(mixed >> (8 * i)) & 0xFF];
        return next;
    }
    static uint64_t byte(uint64_t crc, unsigned char byte) {
        return (crc >> 8) ^ kTables[0][(crc ^ byte) & 0xFF];
    }
};

}  // namespace

const Implementation kTable{"table", crc_of_bytes<TableStep>, crc_of_runs<TableStep>};

}  // namespace infinity::checksum
