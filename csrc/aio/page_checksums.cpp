#include "page_checksums.hpp"

#include <algorithm>

#include "implementations.hpp"

namespace infinity::aio {
namespace {

constexpr uint64_t batch = 64;  // pages whose checksums are computed in one go

}  // namespace

// calloc takes untouched memory from the system, which backs it when it is used.
PageChecksums::PageChecksums(uint64_t file_bytes)
    : pages_(file_bytes / page),
      crcs_(static_cast<uint32_t*>(std::calloc(std::max<uint64_t>(pages_, 1), sizeof(uint32_t)))) {
    if (!crcs_)
        throw BadRequest("The checksums of a file of " + std::to_string(file_bytes) +
                             " bytes do not fit in memory.",
                         "Raise the limit of memory, use a smaller file, or do not verify it.");
}

PageChecksums::Pages PageChecksums::touched_by(const Range& range) const {
    const uint64_t end = (range.offset + range.bytes + page - 1) / page;
    return {std::min(range.offset / page, pages_), std::min(end, pages_)};
}

PageChecksums::Pages PageChecksums::covered_by(const Range& range) const {
    const uint64_t first = (range.offset + page - 1) / page;
    const uint64_t end = std::min((range.offset + range.bytes) / page, pages_);
    return {std::min(first, end), end};
}

// Writes the checksums of pages that lie one behind the other. None of them is 0, which stands for
// a checksum that is unknown.
void PageChecksums::compute(const std::byte* data, uint64_t pages, uint32_t* out) {
    const checksum::Run run{data, pages * page, page, out};
    checksum::runnable_implementations().front()->runs(&run, 1);
    for (uint64_t i = 0; i < pages; ++i) out[i] = std::max(out[i], 1u);
}

void PageChecksums::written(const Range& range) {
    const Pages whole = covered_by(range);
    if (range.offset % page != 0 || range.bytes % page != 0) unknown(range);
    if (whole.first == whole.end) return;
    compute(range.address + (whole.first * page - range.offset), whole.end - whole.first,
            crcs_.get() + whole.first);
}

void PageChecksums::unknown(const Range& range) {
    const Pages pages = touched_by(range);
    std::fill(crcs_.get() + pages.first, crcs_.get() + pages.end, 0u);
}

std::optional<uint64_t> PageChecksums::difference(const Range& range) {
    const Pages whole = covered_by(range);
    uint32_t found[batch];
    for (uint64_t first = whole.first; first < whole.end; first += batch) {
        const uint64_t count = std::min(batch, whole.end - first);
        compute(range.address + (first * page - range.offset), count, found);
        uint32_t* const known = crcs_.get() + first;
        for (uint64_t i = 0; i < count; ++i) {
            if (known[i] == 0) {
                known[i] = found[i];
            } else if (known[i] == found[i]) {
                compared_ += page;
            } else {
                return (first + i) * page;
            }
        }
    }
    return std::nullopt;
}

}  // namespace infinity::aio
