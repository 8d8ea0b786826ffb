// The checksum of each page of a file, as it was last written.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>

#include "request.hpp"

namespace infinity::aio {

// [Note: verified reads]
// A disk can return other bytes than were written to it, without an error: a bit that has flipped,
// a write that was dropped or torn, a page that another program has overwritten. So a file that is
// opened to be verified has a CRC-32C of each page of 4096 bytes in memory. It is computed when a
// block is handed to the backend, and compared when a block has been read, both on the engine's
// thread. A page that was not written since the file was opened takes the checksum of its first
// read. The checksum of a page is unknown, and not compared, after a write that has failed or has
// covered only a part of the page; a read that covers only a part of it compares nothing.
// Transfers that overlap must not be in flight together; see [Note: ordering].
class PageChecksums {
  public:
    static constexpr uint64_t page = 4096;

    // For the pages of a file that has so many bytes. Memory is used only for pages that are
    // written or read: 4 bytes for each. Throws BadRequest where the system refuses it.
    explicit PageChecksums(uint64_t file_bytes);

    void written(const Range& range);
    void unknown(const Range& range);

    // Compares what was read. Returns the offset of the first page that has other bytes.
    std::optional<uint64_t> difference(const Range& range);

    // Bytes that `difference` has found to be those of their checksums, which were known.
    uint64_t compared() const { return compared_; }

  private:
    struct Free {
        void operator()(uint32_t* data) const { std::free(data); }
    };
    struct Pages {
        uint64_t first;
        uint64_t end;
    };

    Pages touched_by(const Range& range) const;
    Pages covered_by(const Range& range) const;
    static void compute(const std::byte* data, uint64_t pages, uint32_t* out);

    const uint64_t pages_;
    std::unique_ptr<uint32_t[], Free> crcs_;  // 0: unknown
    uint64_t compared_ = 0;
};

}  // namespace infinity::aio
