// Which backends work in a directory: found by doing I/O there, never by version numbers.
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
    std::string reason;   // why not ok, or why not direct; else empty
    std::string features;
};

struct DirectoryReport {
    Alignment alignment;                  // as statx tells, before any round trip
    std::vector<BackendReport> backends;  // in order of choice
};

// Writes and reads back a few pages of a temporary file by each backend. No directory: a file in
// memory, which shows only that the system calls are there. Throws StorageFailure where no file can
// be made or the file system is full.
DirectoryReport probe(const std::optional<std::string>& directory);

// The report of the named backend, or for "auto" of the first that works; the rejected ones are
// appended to `rejected`. Throws Unavailable, BadRequest, StorageFailure.
BackendReport choose(const std::optional<std::string>& directory, const std::string& name,
                     std::vector<BackendReport>& rejected);

}  // namespace infinity::aio
