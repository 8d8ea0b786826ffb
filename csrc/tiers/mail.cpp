#include "mail.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace infinity::tiers {

namespace {

constexpr std::uint64_t kLine = 64;  // bytes of a cache line

// Words that several processes use at the same time. Sequentially consistent: [Note: need wakeup].
std::uint64_t load(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_SEQ_CST); }

void store(std::uint64_t& word, std::uint64_t value) {
    __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

}  // namespace

struct Mail::Head {
    alignas(kLine) std::uint64_t sleepers[2];
};

struct Mail::Way {
    alignas(kLine) std::uint64_t written;  // bytes sent to the peer so far
    std::uint64_t read;                    // bytes of the peer read so far
    alignas(kLine) char ring[kRing];
};

std::uint64_t Mail::nbytes(std::uint64_t ranks) { return sizeof(Head) + ranks * sizeof(Way); }

Mail::Mail(std::shared_ptr<Region> own, std::uint64_t ranks, std::uint64_t rank)
    : own_(std::move(own)), ranks_(ranks), rank_(rank), others_(ranks) {
    if (rank >= ranks || own_->nbytes() < nbytes(ranks)) throw std::out_of_range("too small");
}

void Mail::meet(std::uint64_t peer, std::shared_ptr<Region> theirs) {
    if (peer >= ranks_ || theirs->nbytes() < nbytes(ranks_)) throw std::out_of_range("too small");
    others_[peer] = std::move(theirs);
}

const Region& Mail::region_of(std::uint64_t peer) const {
    if (peer >= ranks_ || others_[peer] == nullptr) throw std::out_of_range("no such peer");
    return *others_[peer];
}

Mail::Head& Mail::head(const Region& region) { return *reinterpret_cast<Head*>(region.address()); }

Mail::Way& Mail::way(const Region& region, std::uint64_t peer) {
    return reinterpret_cast<Way*>(region.address() + sizeof(Head))[peer];
}

std::uint64_t Mail::write(std::uint64_t peer, const char* bytes, std::uint64_t nbytes) {
    const Way& theirs = way(region_of(peer), rank_);
    Way& mine = way(*own_, peer);
    const std::uint64_t unread = mine.written - load(theirs.read);
    if (unread > kRing) throw std::runtime_error("the peer has read more than was sent");
    nbytes = std::min(nbytes, kRing - unread);
    const std::uint64_t at = mine.written % kRing, first = std::min(nbytes, kRing - at);
    std::memcpy(mine.ring + at, bytes, first);
    std::memcpy(mine.ring, bytes + first, nbytes - first);
    store(mine.written, mine.written + nbytes);
    return nbytes;
}

std::uint64_t Mail::unread(std::uint64_t peer) const {
    const std::uint64_t written = load(way(region_of(peer), rank_).written);
    const std::uint64_t nbytes = written - way(*own_, peer).read;
    if (nbytes > kRing) throw std::runtime_error("the peer has sent more than there is room for");
    return nbytes;
}

void Mail::read(std::uint64_t peer, char* into, std::uint64_t nbytes) {
    const Way& theirs = way(region_of(peer), rank_);
    Way& mine = way(*own_, peer);
    const std::uint64_t at = mine.read % kRing, first = std::min(nbytes, kRing - at);
    std::memcpy(into, theirs.ring + at, first);
    std::memcpy(into + first, theirs.ring, nbytes - first);
    store(mine.read, mine.read + nbytes);
}

bool Mail::unread() const {
    for (std::uint64_t peer = 0; peer < ranks_; ++peer) {
        if (others_[peer] == nullptr) continue;
        if (load(way(*others_[peer], rank_).written) != load(way(*own_, peer).read)) return true;
    }
    return false;
}

void Mail::sleep(std::uint64_t who, std::uint64_t how) {
    if (who > 1) throw std::out_of_range("no such sleeper");
    store(head(*own_).sleepers[who], how);
}

std::uint64_t Mail::sleeper(std::uint64_t peer, std::uint64_t who) const {
    if (who > 1) throw std::out_of_range("no such sleeper");
    return load(head(region_of(peer)).sleepers[who]);
}

}  // namespace infinity::tiers
