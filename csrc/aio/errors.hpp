// The errors that the core throws. The bindings turn them into errors of infinity.errors.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace infinity::aio {

// A failed operation on a path: the content of a StorageError.
struct Failure {
    std::string operation;  // a verb for people: "read", "open"
    std::string path;
    std::optional<uint64_t> offset;  // bytes
    int error = 0;                   // errno; end_of_file for a read past the end, or other_bytes
    uint64_t position = 0;           // other_bytes: of the first such byte in the request's memory
};

// The error of a read that met the end of the file. No errno exists for that, and disks do not
// report this one.
inline constexpr int end_of_file = 61;  // ENODATA

// The error of a read that has returned other bytes than were written; see [Note: verified reads].
inline constexpr int other_bytes = -1;

class StorageFailure : public std::exception {
  public:
    explicit StorageFailure(Failure failure) : failure_(std::move(failure)) {}
    const char* what() const noexcept override { return "storage operation failed"; }
    const Failure& failure() const noexcept { return failure_; }

  private:
    Failure failure_;
};

// The caller asked for something impossible: the cause and cure of a ConfigError.
class BadRequest : public std::invalid_argument {
  public:
    BadRequest(const std::string& cause, std::string cure)
        : std::invalid_argument(cause), cure_(std::move(cure)) {}
    const std::string& cure() const noexcept { return cure_; }

  private:
    std::string cure_;
};

// Thrown for a backend that this machine does not offer. what() gives the reason.
class Unavailable : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// For example "io_uring_setup: Operation not permitted (errno 1)".
std::string describe_errno(const std::string& call, int error);

}  // namespace infinity::aio
