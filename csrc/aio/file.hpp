// One open file: its descriptors and the alignment that direct I/O on it needs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "page_checksums.hpp"
#include "request.hpp"

namespace infinity::aio {

// [Note: unaligned parts]
// O_DIRECT takes only aligned offsets, lengths and addresses. Parts of a request that are not
// aligned go through a second descriptor without O_DIRECT, that is, through the page cache. Two
// rules keep these parts coherent with direct transfers of *other* requests in flight nearby:
// - The two kinds of transfer never share a page. A buffered write reads whole pages and later
//   writes them back. If a direct write landed on another sector of such a page in between, the
//   write-back would undo it. So parts are cut at `granularity`, the larger of the page size and
//   the device's alignment, though many devices would take 512 bytes.
// - The buffered descriptor is POSIX_FADV_RANDOM. Read-ahead would fill the cache with pages that a
//   direct write in flight is just replacing, and in larger units than a page.
// Two requests that share a page without overlapping both reach that page buffered, where the
// kernel's locks order them. The kernel flushes and drops cached pages around every direct
// transfer, so a later direct read sees buffered bytes. fdatasync on either descriptor covers the
// writes of both.
class File {
  public:
    // Throws StorageFailure. If `direct` is false, O_DIRECT is never used.
    static std::shared_ptr<File> open(const std::string& path, bool writable, bool direct);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string& path() const { return path_; }
    bool writable() const { return writable_; }
    const Alignment& alignment() const { return alignment_; }
    uint64_t size() const;  // the present size in bytes
    int descriptor(bool direct) const { return direct ? direct_ : buffered_; }

    // The file's slots in the backend's table of registered files, or -1. For the engine's thread
    // only.
    int slot(bool direct) const { return direct ? direct_slot_ : buffered_slot_; }
    void set_slots(int direct_slot, int buffered_slot) {
        direct_slot_ = direct_slot;
        buffered_slot_ = buffered_slot;
    }

    // Has reads compared with what was written; see [Note: verified reads]. Called before the first
    // request. Throws BadRequest.
    void verify() { checksums_.emplace(size()); }
    // Null if reads are not verified. For the engine's thread only.
    PageChecksums* checksums() { return checksums_ ? &*checksums_ : nullptr; }

    // Guarded by the engine's mutex.
    uint64_t pending = 0;  // requests that have not landed yet
    bool closed = false;

  private:
    File(std::string path, bool writable) : path_(std::move(path)), writable_(writable) {}
    void open_direct();

    std::string path_;
    bool writable_;
    int buffered_ = -1;
    int direct_ = -1;
    int direct_slot_ = -1;
    int buffered_slot_ = -1;
    Alignment alignment_;
    std::optional<PageChecksums> checksums_;
};

}  // namespace infinity::aio
