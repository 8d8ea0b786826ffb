// What the core throws; the bindings turn these into infinity.errors.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace infinity::aio {

// An operation on a path failed: what a StorageError says.
struct Failure {
    std::string operation;  // a verb for people: "read", "open"
    std::string path;
    std::optional<uint64_t> offset;  // bytes
    int error = 0;                   // errno; end_of_file for a read past the end
};

// A read met the end of the file: no errno exists for that, and no disk reports this one.
inline constexpr int end_of_file = 61;  // ENODATA

class StorageFailure : public std::exception {
  public:
    explicit StorageFailure(Failure failure) : failure_(std::move(failure)) {}
    const char* what() const noexcept override { return "storage operation failed"; }
    const Failure& failure() const noexcept { return failure_; }

  private:
    Failure failure_;
};

// The caller asked for something that cannot be: a ConfigError's cause and cure.
class BadRequest : public std::invalid_argument {
  public:
    BadRequest(const std::string& cause, std::string cure)
        : std::invalid_argument(cause), cure_(std::move(cure)) {}
    const std::string& cure() const noexcept { return cure_; }

  private:
    std::string cure_;
};

// A backend that this machine does not offer; what() says why.
class Unavailable : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// "io_uring_setup: Operation not permitted (errno 1)"
std::string describe_errno(const std::string& call, int error);

}  // namespace infinity::aio
