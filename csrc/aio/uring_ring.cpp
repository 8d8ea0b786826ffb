#include "uring_ring.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>

#include "errors.hpp"

namespace infinity::aio::uring {
namespace {

template <typename T>
T load_acquire(T* from) {
    return std::atomic_ref<T>(*from).load(std::memory_order_acquire);
}
template <typename T>
void store_release(T* to, T value) {
    std::atomic_ref<T>(*to).store(value, std::memory_order_release);
}

}  // namespace

Ring::Ring(unsigned entries) {
    set_up(entries);
    try {
        map();
    } catch (...) {
        ::close(descriptor_);
        throw;
    }
}

void Ring::set_up(unsigned entries) {
    // DEFER_TASKRUN: completions are processed only when this thread asks for them, so they
    // interrupt it at no other time. The flag needs a single issuer, which start() makes the
    // engine's thread.
    constexpr uint32_t attempts[] = {setup_single_issuer | setup_defer_taskrun | setup_r_disabled,
                                     setup_coop_taskrun, 0};
    for (const uint32_t flags : attempts) {
        params_ = {};
        params_.flags = flags;
        const long result = syscall(SYS_io_uring_setup, entries, &params_);
        if (result >= 0) {
            descriptor_ = static_cast<int>(result);  // the kernel has made it O_CLOEXEC
            return;
        }
        if (errno != EINVAL) break;  // EINVAL: a kernel that lacks these flags
    }
    const int error = errno;
    std::string reason = describe_errno("io_uring_setup", error);
    if (error == EPERM) reason += "; see /proc/sys/kernel/io_uring_disabled, or a seccomp filter";
    if (error == ENOMEM) reason += "; the limit of locked memory (ulimit -l) is too low";
    throw Unavailable(reason);
}

void Ring::map() {
    if ((params_.features & feature_single_mmap) == 0)
        throw Unavailable("this kernel's io_uring is older than Linux 5.4");
    shared_bytes_ = std::max<size_t>(params_.sq.array + params_.sq_entries * sizeof(uint32_t),
                                     params_.cq.cqes + params_.cq_entries * sizeof(Cqe));
    const auto map_at = [&](size_t bytes, uint64_t offset) {
        return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_,
                    static_cast<off_t>(offset));
    };
    void* shared = map_at(shared_bytes_, mmap_sq_ring);
    if (shared == MAP_FAILED) throw Unavailable(describe_errno("mmap of the io_uring", errno));
    const size_t sqe_bytes = params_.sq_entries * sizeof(Sqe);
    void* entries = map_at(sqe_bytes, mmap_sqes);
    if (entries == MAP_FAILED) {
        const int error = errno;
        munmap(shared, shared_bytes_);
        throw Unavailable(describe_errno("mmap of the io_uring", error));
    }
    madvise(shared, shared_bytes_, MADV_DONTFORK);
    madvise(entries, sqe_bytes, MADV_DONTFORK);
    shared_ = static_cast<std::byte*>(shared);
    sqes_ = static_cast<Sqe*>(entries);
    const auto at = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(shared_ + offset); };
    sq_head_ = at(params_.sq.head);
    sq_tail_ = at(params_.sq.tail);
    cq_head_ = at(params_.cq.head);
    cq_tail_ = at(params_.cq.tail);
    sq_mask_ = *at(params_.sq.ring_mask);
    cq_mask_ = *at(params_.cq.ring_mask);
    cqes_ = reinterpret_cast<Cqe*>(shared_ + params_.cq.cqes);
    // Entries go out in order, so the indirection table stays the identity for good.
    for (uint32_t i = 0; i < params_.sq_entries; ++i) at(params_.sq.array)[i] = i;
}

Ring::~Ring() {
    munmap(sqes_, params_.sq_entries * sizeof(Sqe));
    munmap(shared_, shared_bytes_);
    ::close(descriptor_);
}

Sqe& Ring::prepare() {
    Sqe& entry = sqes_[tail_++ & sq_mask_];
    entry = Sqe{};
    return entry;
}

unsigned Ring::unsubmitted() const { return tail_ - load_acquire(sq_head_); }

bool Ring::take_back(Sqe& entry) {
    if (unsubmitted() == 0) return false;
    entry = sqes_[--tail_ & sq_mask_];
    store_release(sq_tail_, tail_);
    return true;
}

bool Ring::next(Cqe& completion) {
    const uint32_t head = *cq_head_;  // only this thread writes it
    if (head == load_acquire(cq_tail_)) return false;
    completion = cqes_[head & cq_mask_];
    store_release(cq_head_, head + 1);  // after the copy: the kernel may reuse the entry now
    return true;
}

long Ring::enter(unsigned submit, bool sleep, TimePoint until) {
    store_release(sq_tail_, tail_);
    // GETEVENTS is set even without sleeping. With DEFER_TASKRUN nothing completes otherwise, and
    // the flag also brings back completions that overflowed the ring.
    if (!sleep) return enter_call(submit, 0, enter_getevents, nullptr, 0);
    if (until == TimePoint::max()) return enter_call(submit, 1, enter_getevents, nullptr, 0);
    const auto left =
        std::max(std::chrono::nanoseconds(until - Clock::now()), std::chrono::nanoseconds(0));
    const KernelTimespec timeout{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
    if ((params_.features & feature_ext_arg) != 0) {
        WaitArgument argument{0, 0, 0, reinterpret_cast<uint64_t>(&timeout)};
        return enter_call(submit, 1, enter_getevents | enter_ext_arg, &argument, sizeof argument);
    }
    const long submitted = enter_call(submit, 0, enter_getevents, nullptr, 0);
    if (submitted < 0) return submitted;
    pollfd ready{descriptor_, POLLIN, 0};
    const timespec limit{static_cast<time_t>(timeout.seconds),
                         static_cast<long>(timeout.nanoseconds)};
    return ppoll(&ready, 1, &limit, nullptr) == 0 ? -ETIME : submitted;
}

long Ring::enter_call(unsigned submit, unsigned minimum, unsigned flags, void* argument,
                      size_t bytes) const {
    const long result =
        syscall(SYS_io_uring_enter, descriptor_, submit, minimum, flags, argument, bytes);
    return result < 0 ? -errno : result;
}

long Ring::register_with(unsigned operation, const void* argument, unsigned count) const {
    const long result = syscall(SYS_io_uring_register, descriptor_, operation, argument, count);
    return result < 0 ? -errno : result;
}

}  // namespace infinity::aio::uring
