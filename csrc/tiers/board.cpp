#include "board.hpp"

#include <cstring>
#include <stdexcept>

namespace infinity::tiers {

namespace {

std::uint64_t load(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }

void store(std::uint64_t& word, std::uint64_t value) {
    __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}

}  // namespace

// Words that two processes use at the same time, so all accesses are atomic.
struct Board::Entry {
    std::uint64_t changes;
    std::uint64_t offset;
    std::uint64_t stamp[std::tuple_size_v<Stamp>];

    bool has(const Stamp& wanted) const {
        for (std::size_t at = 0; at < wanted.size(); ++at) {
            if (load(stamp[at]) != wanted[at]) return false;
        }
        return true;
    }
};

Board::Entry* Board::entry(std::uint64_t index) const {
    static_assert(sizeof(Entry) <= kEntryBytes);
    if (index >= entries()) throw std::out_of_range("the board has no such entry");
    return reinterpret_cast<Entry*>(memory_->address() + index * kEntryBytes);
}

void Board::open(std::uint64_t index, const Stamp& stamp, std::uint64_t offset) {
    Entry& entry = *this->entry(index);
    if (load(entry.offset) == offset && changes(index, stamp) != 0) return;
    close(index);
    store(entry.offset, offset);
    for (std::size_t at = 0; at < stamp.size(); ++at) store(entry.stamp[at], stamp[at]);
    // Release: whoever sees the entry open sees these words, and the bytes as they are now.
    __atomic_store_n(&entry.changes, load(entry.changes) + 1, __ATOMIC_RELEASE);
}

void Board::close(std::uint64_t index) {
    Entry& entry = *this->entry(index);
    const std::uint64_t changes = load(entry.changes);
    if (changes % 2 == 0) return;
    store(entry.changes, changes + 1);
    __atomic_thread_fence(__ATOMIC_RELEASE);  // before the bytes change
}

std::uint64_t Board::changes(std::uint64_t index, const Stamp& stamp) const {
    const Entry& entry = *this->entry(index);
    const std::uint64_t changes = __atomic_load_n(&entry.changes, __ATOMIC_ACQUIRE);
    return changes % 2 != 0 && entry.has(stamp) ? changes : 0;
}

bool Board::unchanged(std::uint64_t index, std::uint64_t changes) const {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);  // the copy before the second look
    return load(entry(index)->changes) == changes;
}

bool Board::copy(std::uint64_t index, const Stamp& stamp, const Window& window, std::uint64_t start,
                 std::byte* into, std::uint64_t nbytes) const {
    const std::uint64_t changes = this->changes(index, stamp);
    if (changes == 0) return false;
    const std::uint64_t offset = load(entry(index)->offset);
    if (offset > window.nbytes() || start > window.nbytes() - offset ||
        nbytes > window.nbytes() - offset - start) {
        if (!unchanged(index, changes)) return false;  // the words belong to different opens
        throw std::out_of_range("the bytes are not in the shared memory");
    }
    const std::byte* from = window.address() + offset + start;
    std::memcpy(into, from, nbytes);
    window.forget(offset + start, nbytes);
    return unchanged(index, changes);
}

}  // namespace infinity::tiers
