// The two queues that io_uring shares with the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "future.hpp"
#include "uring_abi.hpp"

namespace infinity::aio::uring {

// The ring's descriptor and its two shared mappings. Of one thread.
class Ring {
  public:
    // Throws Unavailable with the reason.
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // The next free entry. There is always one: entries >= outstanding transfers + the wake-up.
    Sqe& prepare();
    // Prepared, not yet consumed by the kernel.
    unsigned unsubmitted() const;
    // Takes the unsubmitted entries back, newest first; false when there is none.
    bool take_back(Sqe& entry);
    // Submits so many entries and, if it is to sleep, waits for a completion until then. Returns
    // what the system call did, or -errno.
    long enter(unsigned submit, bool sleep, TimePoint until);
    bool next(Cqe& completion);
    long register_with(unsigned operation, const void* argument, unsigned count) const;
    uint32_t flags() const { return params_.flags; }

  private:
    void set_up(unsigned entries);
    void map();
    long enter_call(unsigned submit, unsigned minimum, unsigned flags, void* argument,
                    size_t bytes) const;

    int descriptor_ = -1;
    Params params_{};
    std::byte* shared_ = nullptr;
    size_t shared_bytes_ = 0;
    Sqe* sqes_ = nullptr;
    Cqe* cqes_ = nullptr;
    uint32_t* sq_head_ = nullptr;
    uint32_t* sq_tail_ = nullptr;
    uint32_t* cq_head_ = nullptr;
    uint32_t* cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0;
    uint32_t cq_mask_ = 0;
    uint32_t tail_ = 0;
};

}  // namespace infinity::aio::uring
