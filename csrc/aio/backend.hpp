// The interface between an engine and a way of doing I/O.
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

// Every method but wake() is called from one thread: the one that called start().
class Backend {
  public:
    virtual ~Backend() = default;

    virtual const char* name() const = 0;

    // First call on the thread that will use it.
    virtual void start() {}

    // Accepts a transfer. The kernel may not see it before the next wait(). At most the depth given
    // at creation are outstanding.
    virtual void submit(Transfer& transfer) = 0;

    // Hands over what was submitted and appends completions to `done`. Sleeps until there is one,
    // until wake(), or until `until`, whichever is first; a past `until` does not sleep.
    // `wakeable` false: the caller would not mind missing a wake() until the next completion.
    virtual void wait(TimePoint until, bool wakeable, std::vector<Completion>& done) = 0;

    // From any thread: ends the present wait(), or the next.
    virtual void wake() = 0;

    // Complete what is held back on purpose (injected delays) without waiting longer.
    virtual void expedite() {}

    // Registered files: slots, or false where that is not to be had.
    virtual bool attach(File&) { return false; }
    virtual void detach(File&) {}

    // Registered buffers, by pieces of at most 1 GiB. Empty, or the reason why not.
    virtual std::string register_buffer(std::byte*, size_t) {
        return std::string(name()) + " has no registered buffers";
    }

    // What of the kernel's newer offers is in use, for people.
    virtual std::string features() const { return ""; }
};

inline constexpr const char* backend_names[] = {"io_uring", "libaio", "threads"};

// Throws Unavailable with the reason, BadRequest for an unknown name.
std::unique_ptr<Backend> make_backend(const std::string& name, unsigned depth);

std::unique_ptr<Backend> make_uring(unsigned depth);
std::unique_ptr<Backend> make_libaio(unsigned depth);
std::unique_ptr<Backend> make_threads(unsigned depth);

}  // namespace infinity::aio
