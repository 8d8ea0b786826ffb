// Finds out which backends work in a directory, by doing I/O there and never by version numbers.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend.hpp"

namespace infinity::aio {

struct BackendReport {
    std::string name;
    bool ok = false;
    bool direct = false;  // the round trip went through O_DIRECT
    std::string reason;   // the reason for not ok or not direct, else empty
    std::string features;
};

struct DirectoryReport {
    Alignment alignment;                  // as statx reports it, before any round trip
    std::vector<BackendReport> backends;  // in order of preference
};

// Writes and reads back a few pages of a temporary file with each backend. Without a directory the
// file is in memory, which shows only that the system calls exist. Throws StorageFailure if no file
// can be made or the file system is full.
DirectoryReport probe(const std::optional<std::string>& directory);

// The report of the named backend, or with "auto" of the first backend that works. Reports of
// rejected backends are appended to `rejected`. Throws Unavailable, BadRequest, StorageFailure.
BackendReport choose(const std::optional<std::string>& directory, const std::string& name,
                     std::vector<BackendReport>& rejected);

}  // namespace infinity::aio
