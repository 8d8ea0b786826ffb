#include "loop.hpp"

#include <cerrno>

#include "file.hpp"

namespace infinity::aio {
namespace {

// The most attempts of a transfer. One that the kernel keeps refusing fails after 0.1 s in all: the
// pauses begin at 0.1 ms and double up to 20 ms.
constexpr uint32_t most_tries = 12;
constexpr std::chrono::microseconds first_backoff{100};
constexpr std::chrono::microseconds longest_backoff{20'000};

constexpr size_t index(Kind kind) { return static_cast<size_t>(kind); }

bool aligned(const Transfer& transfer) {
    const Alignment& alignment = transfer.file->alignment();
    const auto address = reinterpret_cast<uintptr_t>(transfer.address);
    return (transfer.offset | transfer.bytes) % alignment.granularity == 0 &&
           address % alignment.memory == 0;
}

}  // namespace

Loop::Loop(Backend& backend, unsigned depth, uint32_t block_bytes)
    : backend_(backend), block_bytes_(block_bytes), transfers_(depth) {
    for (unsigned slot = depth; slot-- > 0;) {
        transfers_[slot].slot = slot;
        free_.push_back(&transfers_[slot]);
    }
    completions_.reserve(depth);
}

void Loop::add(std::unique_ptr<Request> request) {
    request->sequence = sequence_++;
    if (request->memory == nullptr) request->memory = request->left.address;
    queue_.push(request.release());
    stats_.queue_peak = std::max<uint64_t>(stats_.queue_peak, queue_.size());
}

void Loop::issue() {
    if (!parked_.empty()) {
        const TimePoint now = Clock::now();
        std::erase_if(parked_, [&](Transfer* transfer) {
            if (transfer->not_before > now) return false;
            send(*transfer);
            return true;
        });
    }
    while (!free_.empty() && !queue_.empty()) {
        Request* request = queue_.top();
        if (request->issued()) {
            queue_.pop();
            finish_if_landed(request);
            continue;
        }
        Transfer& transfer = *free_.back();
        free_.pop_back();
        Range& left = request->left;
        const Block block = request->kind == Kind::sync
                                ? Block{0, request->file->alignment().direct}
                                : first_block(left, request->file->alignment(), block_bytes_);
        transfer.kind = request->kind;
        transfer.file = request->file.get();
        transfer.request = request;
        transfer.direct = block.direct;
        transfer.address = left.address;
        transfer.offset = left.offset;
        transfer.bytes = block.bytes;
        transfer.block = {left.address, left.offset, block.bytes};
        transfer.tries = 0;
        left = {left.address + block.bytes, left.offset + block.bytes, left.bytes - block.bytes};
        request->started = true;
        ++request->in_flight;
        account(transfer.kind, 1);
        if (PageChecksums* checksums = transfer.file->checksums();
            checksums != nullptr && transfer.kind == Kind::write)
            checksums->written(transfer.block);
        send(transfer);
        if (request->issued()) queue_.pop();
    }
}

void Loop::send(Transfer& transfer) {
    ++stats_.transfers[index(transfer.kind)];
    backend_.submit(transfer);
}

void Loop::wait(bool wakeable) {
    TimePoint until = TimePoint::max();
    for (const Transfer* transfer : parked_) until = std::min(until, transfer->not_before);
    ++stats_.waits;
    backend_.wait(until, wakeable && parked_.empty(), completions_);
    for (const Completion& completion : completions_) land(*completion.transfer, completion.result);
    completions_.clear();
}

void Loop::land(Transfer& transfer, int64_t result) {
    if (result < 0) {
        const int error = static_cast<int>(-result);
        if (error == EAGAIN || error == EINTR) return retry(transfer, error);
        // This file system asks for more alignment than it reported, so the page cache takes all.
        if (error == EINVAL && transfer.direct && transfer.kind != Kind::sync) {
            transfer.direct = false;
            return send(transfer);
        }
        return fail(transfer, error);
    }
    if (transfer.kind == Kind::sync) return retire(transfer);
    if (result > transfer.bytes) return fail(transfer, EIO);
    if (result == 0) {
        if (transfer.kind == Kind::read) return fail(transfer, end_of_file);
        return retry(transfer, EIO);  // a write that moves no bytes gives no reason
    }
    advance(transfer, static_cast<uint32_t>(result));
}

void Loop::advance(Transfer& transfer, uint32_t moved) {
    stats_.bytes[index(transfer.kind)] += moved;
    if (!transfer.direct) stats_.buffered_bytes += moved;
    if (moved == transfer.bytes) return complete(transfer);
    ++stats_.short_transfers;
    transfer.address += moved;
    transfer.offset += moved;
    transfer.bytes -= moved;
    transfer.tries = 0;
    transfer.direct = transfer.direct && aligned(transfer);
    if (transfer.request->failed) return fail(transfer, ECANCELED);  // the rest is not wanted
    send(transfer);
}

void Loop::retry(Transfer& transfer, int error) {
    if (++transfer.tries >= most_tries || transfer.request->failed) return fail(transfer, error);
    ++stats_.retries;
    const auto backoff = std::min(first_backoff * (1 << (transfer.tries - 1)), longest_backoff);
    transfer.not_before = Clock::now() + backoff;
    parked_.push_back(&transfer);
}

// Ends a transfer of which all bytes have moved.
void Loop::complete(Transfer& transfer) {
    PageChecksums* checksums = transfer.file->checksums();
    if (checksums == nullptr || transfer.kind != Kind::read) return retire(transfer);
    const uint64_t before = checksums->compared();
    const std::optional<uint64_t> offset = checksums->difference(transfer.block);
    stats_.verified_bytes += checksums->compared() - before;
    if (!offset) return retire(transfer);
    const std::byte* byte = transfer.block.address + (*offset - transfer.block.offset);
    fail(transfer, {verb(transfer.kind), transfer.file->path(), offset, other_bytes,
                    static_cast<uint64_t>(byte - transfer.request->memory)});
}

void Loop::fail(Transfer& transfer, int error) {
    Failure failure{verb(transfer.kind), transfer.file->path(), {}, error};
    if (transfer.kind != Kind::sync) failure.offset = transfer.offset;
    fail(transfer, std::move(failure));
}

// Fails the transfer's request. The first failure counts. Blocks in flight still land before the
// future does, since the kernel may use the memory until then.
void Loop::fail(Transfer& transfer, Failure failure) {
    PageChecksums* checksums = transfer.file->checksums();
    if (checksums != nullptr && transfer.kind == Kind::write) checksums->unknown(transfer.block);
    Request& request = *transfer.request;
    if (!request.failed) {
        request.failed = true;
        request.failure = std::move(failure);
    }
    retire(transfer);
}

void Loop::retire(Transfer& transfer) {
    Request* request = transfer.request;
    --request->in_flight;
    account(transfer.kind, -1);
    free_.push_back(&transfer);
    finish_if_landed(request);
}

// A failed request may land while it is still queued. Its entry in the queue goes when its turn
// comes, so the request outlives its landing.
void Loop::finish_if_landed(Request* request) {
    if (request->in_flight != 0 || !request->issued()) return;
    if (request->future) {
        ++stats_.requests[index(request->kind)];
        Landed landed{std::move(request->future), std::move(request->file), std::nullopt};
        if (request->failed) {
            ++stats_.failures;
            landed.failure = std::move(request->failure);
        }
        landed_.push_back(std::move(landed));
    }
    if (!request->queued) delete request;
}

void Loop::cancel() {
    backend_.expedite();
    const std::vector<Transfer*> parked = std::move(parked_);
    parked_.clear();
    for (Transfer* transfer : parked) fail(*transfer, ECANCELED);
    while (!queue_.empty()) {
        Request* request = queue_.pop();
        if (!request->failed) {
            request->failed = true;
            request->failure = {verb(request->kind), request->file->path(), {}, ECANCELED};
            if (request->kind != Kind::sync) request->failure.offset = request->left.offset;
        }
        finish_if_landed(request);
    }
}

void Loop::account(Kind kind, int change) {
    uint32_t& count = in_flight_[index(kind)];
    if (count == 0) busy_since_[index(kind)] = Clock::now();
    count += static_cast<uint32_t>(change);
    if (count == 0) {
        const std::chrono::duration<double> busy = Clock::now() - busy_since_[index(kind)];
        stats_.busy_seconds[index(kind)] += busy.count();
    }
    stats_.in_flight_peak =
        std::max<uint64_t>(stats_.in_flight_peak, transfers_.size() - free_.size());
}

std::vector<Landed> Loop::take_landed() { return std::exchange(landed_, {}); }

Stats Loop::stats() const {
    Stats stats = stats_;
    for (size_t kind = 0; kind < kinds; ++kind) {
        if (in_flight_[kind] == 0) continue;
        const std::chrono::duration<double> busy = Clock::now() - busy_since_[kind];
        stats.busy_seconds[kind] += busy.count();
    }
    return stats;
}

}  // namespace infinity::aio
