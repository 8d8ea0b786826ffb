// Does a transfer by one blocking system call.
#pragma once

#include <unistd.h>

#include <cerrno>

#include "file.hpp"
#include "request.hpp"

namespace infinity::aio {

// Moves the first `bytes` bytes of a transfer. Returns the bytes moved, or -errno.
inline int64_t transfer_now(const Transfer& transfer, uint32_t bytes, bool direct) {
    const int descriptor = transfer.file->descriptor(direct);
    const auto offset = static_cast<off_t>(transfer.offset);
    ssize_t result = 0;
    switch (transfer.kind) {
        case Kind::read:
            result = ::pread(descriptor, transfer.address, bytes, offset);
            break;
        case Kind::write:
            result = ::pwrite(descriptor, transfer.address, bytes, offset);
            break;
        case Kind::sync:
            result = ::fdatasync(descriptor);
            break;
    }
    return result < 0 ? -errno : result;
}

}  // namespace infinity::aio
