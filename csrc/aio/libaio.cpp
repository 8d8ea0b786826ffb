// Linux native AIO by raw system calls. Direct transfers are asynchronous. Buffered ones are done
// inside io_submit, so they block the engine's thread, but no transfer that the kernel already has.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "backend.hpp"
#include "file.hpp"
#include "wakeup.hpp"

namespace infinity::aio {
namespace {

class Libaio final : public Backend {
  public:
    explicit Libaio(unsigned depth) : controls_(depth), events_(depth) {
        if (syscall(SYS_io_setup, depth, &context_) == 0) return;
        const int error = errno;
        std::string reason = describe_errno("io_setup", error);
        if (error == EAGAIN) reason += "; all of /proc/sys/fs/aio-max-nr is in use";
        throw Unavailable(reason);
    }
    ~Libaio() override { syscall(SYS_io_destroy, context_); }

    const char* name() const override { return "libaio"; }
    void submit(Transfer& transfer) override;
    void wait(TimePoint until, bool wakeable, std::vector<Completion>& done) override;
    void wake() override { wakeup_.signal(); }

  private:
    void flush(std::vector<Completion>& done);
    void refuse(iocb& control, int error, std::vector<Completion>& done);
    void sleep(TimePoint until);
    void reap(long minimum, std::vector<Completion>& done);

    Wakeup wakeup_;
    aio_context_t context_ = 0;
    std::vector<iocb> controls_;   // by the transfer's slot
    std::vector<iocb*> prepared_;  // not yet accepted by the kernel, in order
    std::vector<io_event> events_;
    size_t in_kernel_ = 0;
};

void Libaio::submit(Transfer& transfer) {
    iocb& control = controls_[transfer.slot];
    control = iocb{};
    control.aio_data = reinterpret_cast<uint64_t>(&transfer);
    control.aio_fildes = static_cast<uint32_t>(transfer.file->descriptor(transfer.direct));
    // Completions signal the same eventfd as wake(), so one sleep waits for both.
    control.aio_flags = IOCB_FLAG_RESFD;
    control.aio_resfd = static_cast<uint32_t>(wakeup_.descriptor());
    switch (transfer.kind) {
        case Kind::sync:
            control.aio_lio_opcode = IOCB_CMD_FDSYNC;
            break;
        case Kind::read:
        case Kind::write:
            control.aio_lio_opcode = transfer.kind == Kind::read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
            control.aio_buf = reinterpret_cast<uint64_t>(transfer.address);
            control.aio_nbytes = transfer.bytes;
            control.aio_offset = static_cast<int64_t>(transfer.offset);
            break;
    }
    prepared_.push_back(&control);
}

void Libaio::wait(TimePoint until, bool wakeable, std::vector<Completion>& done) {
    const size_t before = done.size();
    flush(done);
    const bool may_sleep = done.size() == before && until > Clock::now();
    if (may_sleep && !wakeable && in_kernel_ > 0 && until == TimePoint::max()) {
        reap(1, done);  // no wake() is expected: sleep and collect in one system call
        return;
    }
    if (may_sleep) sleep(until);
    if (in_kernel_ > 0) reap(0, done);
}

void Libaio::flush(std::vector<Completion>& done) {
    size_t first = 0;
    while (first < prepared_.size()) {
        const long accepted =
            syscall(SYS_io_submit, context_, prepared_.size() - first, prepared_.data() + first);
        if (accepted > 0) {
            in_kernel_ += static_cast<size_t>(accepted);
            first += static_cast<size_t>(accepted);
        } else if (errno == EINTR) {
            continue;
        } else if (errno == EAGAIN && in_kernel_ > 0) {
            break;  // the kernel's queue is full: a completion makes room
        } else {
            refuse(*prepared_[first++], errno, done);  // EAGAIN too: the engine retries it later
        }
    }
    prepared_.erase(prepared_.begin(), prepared_.begin() + static_cast<std::ptrdiff_t>(first));
}

// io_submit stops at a control block that it will not take, and the error is that transfer's
// result. An exception: kernels before 4.18 do not know IOCB_CMD_FDSYNC.
void Libaio::refuse(iocb& control, int error, std::vector<Completion>& done) {
    auto* transfer = reinterpret_cast<Transfer*>(control.aio_data);
    if (transfer->kind == Kind::sync && error == EINVAL)
        error = fdatasync(static_cast<int>(control.aio_fildes)) == 0 ? 0 : errno;
    done.push_back({transfer, -error});
}

void Libaio::sleep(TimePoint until) {
    if (until != TimePoint::max()) {
        const auto left =
            std::max(std::chrono::nanoseconds(until - Clock::now()), std::chrono::nanoseconds(0));
        const timespec limit{static_cast<time_t>(left.count() / 1'000'000'000),
                             static_cast<long>(left.count() % 1'000'000'000)};
        pollfd ready{wakeup_.descriptor(), POLLIN, 0};
        if (ppoll(&ready, 1, &limit, nullptr) <= 0) return;
    }
    wakeup_.clear();
}

void Libaio::reap(long minimum, std::vector<Completion>& done) {
    const long got = syscall(SYS_io_getevents, context_, minimum, static_cast<long>(events_.size()),
                             events_.data(), nullptr);
    for (long i = 0; i < got; ++i) {
        const io_event& event = events_[static_cast<size_t>(i)];
        done.push_back({reinterpret_cast<Transfer*>(event.data), event.res});
        --in_kernel_;
    }
}

}  // namespace

std::unique_ptr<Backend> make_libaio(unsigned depth) { return std::make_unique<Libaio>(depth); }

}  // namespace infinity::aio
