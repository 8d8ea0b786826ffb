// The submission queue and the completion queue that io_uring shares with the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "future.hpp"
#include "uring_abi.hpp"

namespace infinity::aio::uring {

// The ring's descriptor and its two shared mappings. For use by one thread.
class Ring {
  public:
    // Throws Unavailable with the reason.
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // The next free entry. There always is one, since the ring has more entries than there can be
    // transfers outstanding and a wake-up.
    Sqe& prepare();
    // The number of entries prepared that the kernel has not consumed yet.
    unsigned unsubmitted() const;
    // Takes back the newest entry that was not submitted. Returns false if there is none.
    bool take_back(Sqe& entry);
    // Submits `submit` entries and, with `sleep`, waits for a completion until `until`. Returns the
    // result of the system call, or -errno.
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
