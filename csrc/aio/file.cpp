#include "file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

namespace infinity::aio {
namespace {

constexpr uint32_t default_alignment = 4096;
constexpr long tmpfs_magic = 0x01021994;
constexpr long ramfs_magic = 0x858458f6;

// The part of struct statx that is needed, declared here because headers before Linux 6.1 lack it.
struct StatxDirect {
    uint32_t mask;
    uint8_t skipped[148];
    uint32_t memory_align;  // byte 152
    uint32_t offset_align;
    uint8_t rest[96];
};
static_assert(sizeof(StatxDirect) == 256 && offsetof(StatxDirect, memory_align) == 152);
constexpr unsigned statx_dioalign = 0x2000;

#ifndef SYS_statx
#if defined(__x86_64__)
#define SYS_statx 332
#else
#define SYS_statx 291
#endif
#endif

// The alignment that the kernel reports for direct I/O on this descriptor. If it reports nothing, 4
// KiB, which every disk takes. If it reports that direct I/O is impossible, the result is not
// direct.
Alignment direct_alignment(int descriptor) {
    const auto page = static_cast<uint32_t>(sysconf(_SC_PAGESIZE));
    uint32_t memory = default_alignment;
    uint32_t offset = default_alignment;
    StatxDirect status{};
    if (syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, statx_dioalign, &status) == 0 &&
        (status.mask & statx_dioalign) != 0) {
        if (status.memory_align == 0 || status.offset_align == 0) return {};
        memory = std::bit_ceil(status.memory_align);
        offset = std::bit_ceil(status.offset_align);
    }
    return {true, memory, std::max({page, offset, memory})};
}

bool lives_in_memory(int descriptor) {
    struct statfs status{};
    return fstatfs(descriptor, &status) == 0 &&
           (status.f_type == tmpfs_magic || status.f_type == ramfs_magic);
}

int open_retrying(const std::string& path, int flags) {
    int descriptor;
    do {
        descriptor = ::open(path.c_str(), flags | O_CLOEXEC);
    } while (descriptor < 0 && errno == EINTR);
    return descriptor;
}

}  // namespace

const char* verb(Kind kind) {
    constexpr const char* verbs[kinds] = {"read", "write", "sync"};
    return verbs[static_cast<int>(kind)];
}

std::shared_ptr<File> File::open(const std::string& path, bool writable, bool direct) {
    std::shared_ptr<File> file(new File(path, writable));
    file->buffered_ = open_retrying(path, writable ? O_RDWR : O_RDONLY);
    if (file->buffered_ < 0) throw StorageFailure({"open", path, {}, errno});
    struct stat status{};
    if (fstat(file->buffered_, &status) != 0) throw StorageFailure({"open", path, {}, errno});
    if (S_ISDIR(status.st_mode)) throw StorageFailure({"open", path, {}, EISDIR});
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
        throw BadRequest(path + " is neither a regular file nor a block device.",
                         "Give a file on a disk.");
    posix_fadvise(file->buffered_, 0, 0, POSIX_FADV_RANDOM);  // a hint; files in memory refuse it
    if (direct && !lives_in_memory(file->buffered_)) file->open_direct();
    return file;
}

void File::open_direct() {
    direct_ = open_retrying(path_, (writable_ ? O_RDWR : O_RDONLY) | O_DIRECT);
    if (direct_ < 0) {
        if (errno == EINVAL || errno == EOPNOTSUPP) return;  // this file system has no O_DIRECT
        throw StorageFailure({"open", path_, {}, errno});
    }
    alignment_ = direct_alignment(direct_);
    if (alignment_.direct) return;
    ::close(direct_);
    direct_ = -1;
}

File::~File() {
    if (direct_ >= 0) ::close(direct_);
    if (buffered_ >= 0) ::close(buffered_);
}

uint64_t File::size() const {
    const off_t end = lseek(buffered_, 0, SEEK_END);  // a block device has no st_size
    if (end < 0) throw StorageFailure({"measure", path_, {}, errno});
    return static_cast<uint64_t>(end);
}

}  // namespace infinity::aio
