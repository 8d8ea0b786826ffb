// io_uring: submission and waiting in one system call, no data copied, no memory pinned twice.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "backend.hpp"
#include "file.hpp"
#include "uring_abi.hpp"
#include "uring_ring.hpp"
#include "wakeup.hpp"

namespace infinity::aio {
namespace {

using namespace uring;

constexpr unsigned file_slots = 256;
constexpr unsigned buffer_slots = 1024;
constexpr size_t buffer_piece = size_t{1} << 30;  // the kernel's limit for one registered buffer
constexpr uint64_t wake_tag = 0;

// The target of reads of the eventfd's count. It is static, since closing a ring cancels the read
// on it, but later and elsewhere. So the target must outlive every ring.
uint64_t discarded_count;

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
    std::string features() const override;

  private:
    struct Piece {
        std::byte* address = nullptr;
        size_t bytes = 0;
        std::byte* owner = nullptr;  // the address given to register_buffer
    };

    void arm_wakeup();
    void unregister_buffer(std::byte* address);
    void reap(std::vector<Completion>& done);
    void fail_unsubmitted(int error, std::vector<Completion>& done);
    int buffer_index(const Transfer& transfer) const;
    int update_buffer(unsigned index, std::byte* address, size_t bytes);

    // Declared before the ring, so that the ring is closed first.
    Wakeup wakeup_;
    Ring ring_;
    bool armed_ = false;
    std::vector<int> files_;  // descriptor per slot, -1: free; empty: there is no table
    std::vector<Piece> buffers_;
    unsigned buffers_used_ = 0;  // no registered piece lies at this slot or beyond
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

// Fails the unsubmitted transfers after the kernel has refused submissions altogether. Whatever the
// reason is, no transfer may be left waiting.
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
