// Two threads as two processes, each with a Mail over the same two regions: bytes arrive in order,
// and no thread sleeps for ever beside bytes for it. For the sanitizers.
#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "mail.hpp"

using namespace infinity::tiers;

namespace {

using Regions = std::array<std::shared_ptr<Region>, 2>;

Regions zeroed_regions() {
    return {map_host({.nbytes = Mail::nbytes(2)}), map_host({.nbytes = Mail::nbytes(2)})};
}

char expected(std::uint64_t sender, std::uint64_t at) {
    return static_cast<char>(at * (31 + 2 * sender) + at / 251);
}

// Writes all bytes, and then wakes the peer if it sleeps.
void send(Mail& mail, std::uint64_t rank, std::uint64_t nbytes, std::atomic<int>& bell) {
    std::mt19937 random(static_cast<unsigned>(rank));
    std::vector<char> bytes;
    for (std::uint64_t at = 0; at < nbytes;) {
        const std::uint64_t some = std::min<std::uint64_t>(1 + random() % 70000, nbytes - at);
        bytes.resize(some);
        for (std::uint64_t each = 0; each < some; ++each) bytes[each] = expected(rank, at + each);
        const std::uint64_t written = mail.write(1 - rank, bytes.data(), some);
        at += written;
        if (written > 0 && mail.sleeper(1 - rank, 0) != 0) {
            bell.fetch_add(1);
            bell.notify_one();
        }
        if (written < some) std::this_thread::yield();
    }
}

// Reads all bytes of the peer, and sleeps where there are none: until the bell has rung.
void receive(Mail& mail, std::uint64_t rank, std::uint64_t nbytes, std::atomic<int>& bell) {
    std::vector<char> bytes;
    for (std::uint64_t at = 0; at < nbytes;) {
        const int rung = bell.load();
        if (!mail.unread()) {
            mail.sleep(0, 7);
            if (!mail.unread()) bell.wait(rung);
            mail.sleep(0, 0);
        }
        const std::uint64_t some = mail.unread(1 - rank);
        bytes.resize(some);
        mail.read(1 - rank, bytes.data(), some);
        for (std::uint64_t each = 0; each < some; ++each) {
            CHECK(bytes[each] == expected(1 - rank, at + each));
        }
        at += some;
    }
}

void bytes_arrive_in_order_and_wake_who_sleeps() {
    const std::uint64_t nbytes = 5 * Mail::kRing + 12345;  // the rings are reused
    const Regions regions = zeroed_regions();
    std::array<std::atomic<int>, 2> bells{};
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<Mail>> mails;
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
        mails.push_back(std::make_unique<Mail>(regions[rank], 2, rank));
        mails.back()->meet(1 - rank, regions[1 - rank]);
    }
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
        Mail& mail = *mails[rank];
        std::atomic<int>&own = bells[rank], &theirs = bells[1 - rank];
        threads.emplace_back([&mail, &theirs, rank] { send(mail, rank, nbytes, theirs); });
        threads.emplace_back([&mail, &own, rank] { receive(mail, rank, nbytes, own); });
    }
    for (auto& thread : threads) thread.join();
    CHECK(!mails[0]->unread() && !mails[1]->unread());
}

void a_full_ring_takes_no_more() {
    const Regions regions = zeroed_regions();
    Mail sender(regions[0], 2, 0), reader(regions[1], 2, 1);
    sender.meet(1, regions[1]);
    reader.meet(0, regions[0]);
    const std::vector<char> bytes(Mail::kRing + 1, 'x');
    CHECK(sender.write(1, bytes.data(), bytes.size()) == Mail::kRing);
    CHECK(sender.write(1, bytes.data(), 1) == 0);
    CHECK(reader.unread(0) == Mail::kRing);
    std::vector<char> some(3);
    reader.read(0, some.data(), some.size());
    CHECK(sender.write(1, bytes.data(), bytes.size()) == some.size());
}

void who_is_unknown_is_refused() {
    const Regions regions = zeroed_regions();
    Mail mail(regions[0], 2, 0);
    const char byte = 0;
    for (const std::uint64_t peer : {1, 2}) {
        bool refused = false;
        try {
            mail.write(peer, &byte, 1);
        } catch (const std::out_of_range&) {
            refused = true;
        }
        CHECK(refused);
    }
}

}  // namespace

int main() {
    bytes_arrive_in_order_and_wake_who_sleeps();
    a_full_ring_takes_no_more();
    who_is_unknown_is_refused();
}
