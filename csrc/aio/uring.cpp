// io_uring: submission and waiting in one system call, no data copied, nothing pinned twice.
#include <poll.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "backend.hpp"
#include "file.hpp"
#include "uring_abi.hpp"
#include "wakeup.hpp"

namespace infinity::aio {
namespace {

using namespace uring;

constexpr unsigned file_slots = 256;
constexpr unsigned buffer_slots = 1024;
constexpr size_t buffer_piece = size_t{1} << 30;  // the kernel's limit for one registered buffer
constexpr uint64_t wake_tag = 0;

// Where the eventfd's count goes. Static: closing a ring cancels the read on it, but later and
// elsewhere, so the target must outlive every ring.
uint64_t discarded_count;

template <typename T>
T load_acquire(T* from) {
    return std::atomic_ref<T>(*from).load(std::memory_order_acquire);
}
template <typename T>
void store_release(T* to, T value) {
    std::atomic_ref<T>(*to).store(value, std::memory_order_release);
}

// The ring's descriptor and its two shared mappings.
class Ring {
  public:
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // The next free entry. There is always one: entries >= outstanding transfers + the wake-up.
    Sqe& prepare();
    // Prepared, not yet consumed by the kernel.
    unsigned unsubmitted() const { return tail_ - load_acquire(sq_head_); }
    // Takes the unsubmitted entries back, newest first; false when there is none.
    bool take_back(Sqe& entry);
    long enter(unsigned submit, bool sleep, TimePoint until);
    bool next(Cqe& completion);
    long register_with(unsigned operation, const void* argument, unsigned count) const {
        const long result = syscall(SYS_io_uring_register, descriptor_, operation, argument, count);
        return result < 0 ? -errno : result;
    }
    uint32_t flags() const { return params_.flags; }

  private:
    void set_up(unsigned entries);
    void map();
    long enter_call(unsigned submit, unsigned minimum, unsigned flags, void* argument,
                    size_t bytes) {
        const long result =
            syscall(SYS_io_uring_enter, descriptor_, submit, minimum, flags, argument, bytes);
        return result < 0 ? -errno : result;
    }

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
    // DEFER_TASKRUN: completions are processed when this thread asks for them and interrupt it at
    // no other time; needs a single issuer, which start() makes the engine's thread.
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

// Returns what the system call returned, or -errno.
long Ring::enter(unsigned submit, bool sleep, TimePoint until) {
    store_release(sq_tail_, tail_);
    // GETEVENTS even without sleeping: with DEFER_TASKRUN nothing completes otherwise, and it also
    // brings back completions that overflowed the ring.
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

class Uring final : public Backend {
  public:
    explicit Uring(unsigned depth);

    const char* name() const override { return "io_uring"; }
    void start() override {
        if ((ring_.flags() & setup_r_disabled) != 0)
            ring_.register_with(register_enable_rings, nullptr, 0);
    }
    void submit(Transfer& transfer) override;
    void wait(TimePoint until, bool wakeable, std::vector<Completion>& done) override;
    void wake() override { wakeup_.signal(); }
    bool attach(File& file) override;
    void detach(File& file) override;
    std::string register_buffer(std::byte* address, size_t bytes) override;
    void unregister_buffer(std::byte* address) override;
    std::string features() const override;

  private:
    struct Piece {
        std::byte* address = nullptr;
        size_t bytes = 0;
        std::byte* owner = nullptr;  // the address given to register_buffer
    };

    void arm_wakeup();
    void reap(std::vector<Completion>& done);
    void fail_unsubmitted(int error, std::vector<Completion>& done);
    int buffer_index(const Transfer& transfer) const;
    int update_buffer(unsigned index, std::byte* address, size_t bytes);

    // Before the ring: closing the ring comes first.
    Wakeup wakeup_;
    Ring ring_;
    bool armed_ = false;
    std::vector<int> files_;  // descriptor per slot, -1 free; empty: no table
    std::vector<Piece> buffers_;
    unsigned buffers_used_ = 0;  // no piece lies at or beyond
    std::string no_buffers_;     // why there is no table
};

Uring::Uring(unsigned depth) : ring_(depth + 1) {
    std::vector<int> none(file_slots, -1);
    if (ring_.register_with(register_files, none.data(), file_slots) >= 0) files_ = std::move(none);

    const std::vector<iovec> empty(buffer_slots);
    const ResourceRegister table{buffer_slots, 0, 0, reinterpret_cast<uint64_t>(empty.data()), 0};
    const long result = ring_.register_with(register_buffers2, &table, sizeof table);
    if (result >= 0) {
        buffers_.resize(buffer_slots);
    } else {
        no_buffers_ = describe_errno("io_uring_register of a buffer table (Linux 5.13)",
                                     static_cast<int>(-result));
    }
}

void Uring::submit(Transfer& transfer) {
    Sqe& entry = ring_.prepare();
    entry.user_data = reinterpret_cast<uint64_t>(&transfer);
    const int slot = transfer.file->slot(transfer.direct);
    entry.descriptor = slot >= 0 ? slot : transfer.file->descriptor(transfer.direct);
    entry.flags = slot >= 0 ? sqe_fixed_file : 0;
    if (transfer.kind == Kind::sync) {
        entry.opcode = op_fsync;
        entry.operation_flags = fsync_datasync;
        return;
    }
    const int buffer = buffer_index(transfer);
    if (transfer.kind == Kind::read) {
        entry.opcode = buffer >= 0 ? op_read_fixed : op_read;
    } else {
        entry.opcode = buffer >= 0 ? op_write_fixed : op_write;
    }
    entry.buffer_index = static_cast<uint16_t>(std::max(buffer, 0));
    entry.address = reinterpret_cast<uint64_t>(transfer.address);
    entry.bytes = transfer.bytes;
    entry.offset = transfer.offset;
}

void Uring::arm_wakeup() {
    if (armed_) return;
    Sqe& entry = ring_.prepare();
    entry.opcode = op_read;
    entry.descriptor = wakeup_.descriptor();
    entry.address = reinterpret_cast<uint64_t>(&discarded_count);
    entry.bytes = sizeof discarded_count;
    entry.user_data = wake_tag;
    armed_ = true;
}

void Uring::wait(TimePoint until, bool, std::vector<Completion>& done) {
    arm_wakeup();
    const size_t before = done.size();
    reap(done);
    const bool sleep = done.size() == before && armed_ && until > Clock::now();
    const unsigned waiting = ring_.unsubmitted();
    const long result = ring_.enter(waiting, sleep, until);
    reap(done);
    if (result >= 0 || result == -EINTR || result == -ETIME) return;
    if (result == -EAGAIN || result == -EBUSY) {
        // No memory for requests, or a backlog of completions: the next call goes on from here.
        if (done.size() == before) usleep(200);
        return;
    }
    fail_unsubmitted(static_cast<int>(-result), done);
}

void Uring::reap(std::vector<Completion>& done) {
    Cqe completion;
    while (ring_.next(completion)) {
        if (completion.user_data == wake_tag) {
            armed_ = false;
        } else {
            done.push_back({reinterpret_cast<Transfer*>(completion.user_data), completion.result});
        }
    }
}

// The kernel refuses submissions altogether: whatever the reason, no transfer may be left waiting.
void Uring::fail_unsubmitted(int error, std::vector<Completion>& done) {
    Sqe entry;
    while (ring_.take_back(entry)) {
        if (entry.user_data == wake_tag) {
            armed_ = false;
        } else {
            done.push_back({reinterpret_cast<Transfer*>(entry.user_data), -error});
        }
    }
}

bool Uring::attach(File& file) {
    const auto put = [&](int descriptor) -> int {
        const auto free = std::find(files_.begin(), files_.end(), -1);
        if (descriptor < 0 || free == files_.end()) return -1;
        const auto slot = static_cast<unsigned>(free - files_.begin());
        const FilesUpdate update{slot, 0, reinterpret_cast<uint64_t>(&descriptor)};
        if (ring_.register_with(register_files_update, &update, 1) != 1) return -1;
        *free = descriptor;
        return static_cast<int>(slot);
    };
    const int direct = put(file.descriptor(true));
    file.set_slots(direct, put(file.descriptor(false)));
    return file.slot(false) >= 0;
}

void Uring::detach(File& file) {
    for (const bool direct : {true, false}) {
        const int slot = file.slot(direct);
        if (slot < 0) continue;
        const int none = -1;
        const FilesUpdate update{static_cast<uint32_t>(slot), 0, reinterpret_cast<uint64_t>(&none)};
        ring_.register_with(register_files_update, &update, 1);
        files_[static_cast<size_t>(slot)] = -1;
    }
    file.set_slots(-1, -1);
}

int Uring::update_buffer(unsigned index, std::byte* address, size_t bytes) {
    const iovec range{address, bytes};
    const ResourceUpdate update{index, 0, reinterpret_cast<uint64_t>(&range), 0, 1, 0};
    const long result = ring_.register_with(register_buffers_update, &update, sizeof update);
    return result < 0 ? static_cast<int>(-result) : 0;
}

std::string Uring::register_buffer(std::byte* address, size_t bytes) {
    if (buffers_.empty()) return no_buffers_;
    for (size_t begin = 0; begin < bytes; begin += buffer_piece) {
        const size_t piece = std::min(buffer_piece, bytes - begin);
        unsigned index = 0;
        while (index < buffer_slots && buffers_[index].bytes != 0) ++index;
        const int error =
            index == buffer_slots ? ENOSPC : update_buffer(index, address + begin, piece);
        if (error != 0) {
            unregister_buffer(address);
            return describe_errno("io_uring_register of a buffer", error) +
                   (error == ENOMEM ? "; the limit of locked memory (ulimit -l) is too low" : "");
        }
        buffers_[index] = {address + begin, piece, address};
        buffers_used_ = std::max(buffers_used_, index + 1);
    }
    return "";
}

void Uring::unregister_buffer(std::byte* address) {
    for (unsigned index = 0; index < buffers_used_; ++index) {
        if (buffers_[index].bytes == 0 || buffers_[index].owner != address) continue;
        update_buffer(index, nullptr, 0);
        buffers_[index] = {};
    }
    while (buffers_used_ > 0 && buffers_[buffers_used_ - 1].bytes == 0) --buffers_used_;
}

int Uring::buffer_index(const Transfer& transfer) const {
    for (unsigned index = 0; index < buffers_used_; ++index) {
        const Piece& piece = buffers_[index];
        if (transfer.address >= piece.address &&
            transfer.address + transfer.bytes <= piece.address + piece.bytes)
            return static_cast<int>(index);
    }
    return -1;
}

std::string Uring::features() const {
    std::string text;
    const auto add = [&](bool has, const char* feature) {
        if (has) text += (text.empty() ? "" : ", ") + std::string(feature);
    };
    add((ring_.flags() & setup_defer_taskrun) != 0, "deferred completions");
    add((ring_.flags() & setup_coop_taskrun) != 0, "cooperative completions");
    add(!files_.empty(), "registered files");
    add(!buffers_.empty(), "registered buffers");
    return text;
}

}  // namespace

std::unique_ptr<Backend> make_uring(unsigned depth) { return std::make_unique<Uring>(depth); }

}  // namespace infinity::aio
