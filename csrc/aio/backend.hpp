// The interface between an engine and a way of doing I/O, its backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "request.hpp"

namespace infinity::aio {

struct Completion {
    Transfer* transfer;
    int64_t result;  // bytes moved, or -errno
};

// Every method but wake() is called from one thread, which is the one that called start().
class Backend {
  public:
    virtual ~Backend() = default;

    virtual const char* name() const = 0;

    // The first call on the thread that will use the backend.
    virtual void start() {}

    // Accepts a transfer. The kernel may not see it before the next wait(). The engine never has
    // more transfers outstanding than the depth given at creation.
    virtual void submit(Transfer& transfer) = 0;

    // Hands over the submitted transfers and appends completions to `done`. Sleeps until there is a
    // completion, until wake(), or until `until`, whichever is first. A past `until` does not
    // sleep. wakeable: if false, a wake() may go unseen until the next completion.
    virtual void wait(TimePoint until, bool wakeable, std::vector<Completion>& done) = 0;

    // From any thread: ends the present wait(), or the next one.
    virtual void wake() = 0;

    // Completes transfers that are held back on purpose (injected delays) without waiting longer.
    virtual void expedite() {}

    // Registers a file: sets its slots, or returns false where that is not possible.
    virtual bool attach(File&) { return false; }
    virtual void detach(File&) {}

    // Registers memory, in pieces of at most 1 GiB. Returns an empty string, or the reason for a
    // failure.
    virtual std::string register_buffer(std::byte*, size_t) {
        return std::string(name()) + " has no registered buffers";
    }

    // Names the newer features of the kernel that are in use, for people.
    virtual std::string features() const { return ""; }
};

inline constexpr const char* backend_names[] = {"io_uring", "libaio", "threads"};

// Throws Unavailable with the reason, BadRequest for an unknown name.
std::unique_ptr<Backend> make_backend(const std::string& name, unsigned depth);

std::unique_ptr<Backend> make_uring(unsigned depth);
std::unique_ptr<Backend> make_libaio(unsigned depth);
std::unique_ptr<Backend> make_threads(unsigned depth);

}  // namespace infinity::aio
