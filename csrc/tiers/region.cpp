#include "region.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace infinity::tiers {
namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
constexpr std::uint64_t kPiece = std::uint64_t{64} << 20;  // bytes of a thread's turn
constexpr std::uint64_t kMostThreads =
    32;  // more threads would wait for memory, and for the kernel's locks

std::uint64_t base_page() {
    static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
}

[[noreturn]] void fail(int error, const char* what) {
    throw std::system_error(error, std::generic_category(), what);
}

// Constants of asm/unistd.h, linux/fcntl.h and linux/memfd.h, which older C libraries lack.
constexpr long kPidfdOpen = 434;       // on all architectures
constexpr unsigned kCloseOnExec = 1;   // MFD_CLOEXEC
constexpr unsigned kAllowSealing = 2;  // MFD_ALLOW_SEALING
constexpr int kAddSeals = 1033;        // F_ADD_SEALS
constexpr int kGetSeals = 1034;        // F_GET_SEALS
constexpr int kNoSeals = 1;            // F_SEAL_SEAL
constexpr int kNoShrinking = 2;        // F_SEAL_SHRINK
constexpr int kNoGrowing = 4;          // F_SEAL_GROW
constexpr int kNoNewWrites = 16;       // F_SEAL_FUTURE_WRITE, since Linux 5.1

// Maps a new memfd over the private memory at `address`. Returns its descriptor.
int share(std::byte* address, std::uint64_t nbytes) {
    const int descriptor = static_cast<int>(
        ::syscall(SYS_memfd_create, "infinity host tier", kCloseOnExec | kAllowSealing));
    if (descriptor < 0) fail(errno, "memfd_create");
    if (::ftruncate(descriptor, static_cast<off_t>(nbytes)) != 0 ||
        ::mmap(address, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
               descriptor, 0) == MAP_FAILED ||
        (::fcntl(descriptor, kAddSeals, kNoSeals | kNoShrinking | kNoGrowing | kNoNewWrites) != 0 &&
         ::fcntl(descriptor, kAddSeals, kNoSeals | kNoShrinking | kNoGrowing) != 0)) {
        const int error = errno;
        ::close(descriptor);
        fail(error, "shared memory");
    }
    return descriptor;
}

// Maps `nbytes` at a multiple of kHugePage: reserves one huge page more and trims both ends.
std::byte* map_aligned(std::uint64_t nbytes) {
    const std::uint64_t reserved = nbytes + kHugePage;
    void* raw = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) fail(errno, "mmap");
    const auto start = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned != start) ::munmap(raw, aligned - start);
    const std::uintptr_t end = start + reserved;
    if (aligned + nbytes != end) {
        ::munmap(reinterpret_cast<void*>(aligned + nbytes), end - aligned - nbytes);
    }
    return reinterpret_cast<std::byte*>(aligned);
}

// Prefers a NUMA node without demanding it: a wrong node costs speed only, and a kernel without
// NUMA answers ENOSYS.
void prefer_node(std::byte* address, std::uint64_t nbytes, int node) {
#ifdef SYS_mbind
    constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
    constexpr unsigned long kBits = 8 * sizeof(unsigned long);
    std::vector<unsigned long> mask(static_cast<unsigned>(node) / kBits + 1, 0);
    mask[static_cast<unsigned>(node) / kBits] |= 1UL << (static_cast<unsigned>(node) % kBits);
    ::syscall(SYS_mbind, address, nbytes, kPreferred, mask.data(), mask.size() * kBits + 1, 0);
#else
    (void)address, (void)nbytes, (void)node;
#endif
}

// Faults pages in. Returns 0 or an errno.
int fault_in(std::byte* address, std::uint64_t nbytes) {
#ifdef MADV_POPULATE_WRITE
    if (::madvise(address, nbytes, MADV_POPULATE_WRITE) == 0) return 0;
    if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) return errno;
#endif
    for (std::uint64_t at = 0; at < nbytes; at += base_page()) {
        static_cast<volatile std::byte*>(address)[at] = std::byte{0};
    }
    return 0;
}

// The number of CPUs that this thread, and threads that it starts, may run on.
std::uint64_t allowed_cpus() {
    cpu_set_t allowed;
    if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
    return static_cast<std::uint64_t>(std::max(CPU_COUNT(&allowed), 1));
}

// Starts threads that do `work` beside the calling thread. They receive no signals, which are for
// the program's own threads. If a thread cannot be started, the others do its share.
std::vector<std::thread> helpers(std::uint64_t count, const std::function<void()>& work) {
    std::vector<std::thread> started;
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        while (started.size() < count) started.emplace_back(work);
    } catch (const std::system_error&) {  // go on with the threads that could be started
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}

// Faults all pages in. The kernel zeroes each page then, which one thread does at a fraction of
// memory's speed, so the pieces are shared among as many threads as there are CPUs.
void populate(std::byte* address, std::uint64_t nbytes) {
    const std::uint64_t pieces = (nbytes + kPiece - 1) / kPiece;
    std::atomic<std::uint64_t> next = 0;
    std::atomic<int> error = 0;
    const auto work = [&] {
        for (std::uint64_t piece; (piece = next++) < pieces && error == 0;) {
            const std::uint64_t start = piece * kPiece;
            const int failed = fault_in(address + start, std::min(kPiece, nbytes - start));
            if (failed != 0) error = failed;
        }
    };
    auto threads = helpers(std::min({pieces, allowed_cpus(), kMostThreads}) - 1, work);
    work();
    for (std::thread& thread : threads) thread.join();
    if (error != 0) fail(error, "populate");
}

std::uint64_t resident_bytes(const std::byte* address, std::uint64_t nbytes) {
    std::vector<unsigned char> in_core((nbytes + base_page() - 1) / base_page());
    if (::mincore(const_cast<std::byte*>(address), nbytes, in_core.data()) != 0) {
        fail(errno, "mincore");
    }
    const auto pages = std::count_if(in_core.begin(), in_core.end(),
                                     [](unsigned char page) { return (page & 1) != 0; });
    return static_cast<std::uint64_t>(pages) * base_page();
}

// The list of all ranges that map_host has mapped in this process. The list is never destroyed,
// since regions may outlive static destructors. A forked child inherits no range and starts a list
// of its own.
class Mappings {
  public:
    static Mappings& all() {
        static auto* mappings = new Mappings;
        static pid_t owner = ::getpid();
        if (::getpid() != owner) {
            mappings = new Mappings;
            owner = ::getpid();
        }
        return *mappings;
    }
    void add(const std::byte* address, std::uint64_t nbytes) {
        const std::lock_guard lock(mutex_);
        nbytes_[address] = nbytes;
    }
    void unmap(std::byte* address) {
        const std::lock_guard lock(mutex_);  // held until unmapped: unbacked() looks at the pages
        ::munmap(address, nbytes_.at(address));
        nbytes_.erase(address);
    }
    std::uint64_t unbacked() {
        const std::lock_guard lock(mutex_);
        std::uint64_t sum = 0;
        for (const auto& [address, nbytes] : nbytes_) {
            sum += nbytes - std::min(nbytes, resident_bytes(address, nbytes));
        }
        return sum;
    }

  private:
    std::mutex mutex_;
    std::map<const std::byte*, std::uint64_t> nbytes_;
};

}  // namespace

Region::Region(std::byte* address, std::uint64_t nbytes, Device device,
               std::function<void()> release)
    : address_(address),
      nbytes_(nbytes),
      device_(device),
      owner_(::getpid()),
      release_(std::move(release)) {}

Region::~Region() {
    // A forked child did not inherit the bytes, and other memory may lie at their address by now.
    if (::getpid() != owner_) return;
    while (!undo_.empty()) {
        undo_.back()();
        undo_.pop_back();
    }
    if (release_) release_();
    close_descriptor();
}

void Region::close_descriptor() {
    const int descriptor = descriptor_.exchange(-1);
    if (descriptor >= 0) ::close(descriptor);
}

void Region::before_release(std::function<void()> undo) {
    const std::lock_guard lock(mutex_);
    undo_.push_back(std::move(undo));
}

std::shared_ptr<Region> map_host(const HostMapping& wanted) {
    if (wanted.nbytes > PTRDIFF_MAX - 2 * kHugePage) fail(ENOMEM, "mmap");
    const std::uint64_t pages =
        std::max<std::uint64_t>((wanted.nbytes + base_page() - 1) / base_page(), 1);
    const std::uint64_t nbytes = pages * base_page();
    std::byte* address = map_aligned(nbytes);
    Mappings::all().add(address, nbytes);
    auto region = std::make_shared<Region>(address, nbytes, Device{},
                                           [address] { Mappings::all().unmap(address); });
    if (wanted.shared) region->keep_descriptor(share(address, nbytes));
    ::madvise(address, nbytes, MADV_DONTFORK);
    ::madvise(address, nbytes,
              wanted.huge_pages == HugePages::advise ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (wanted.numa_node >= 0) prefer_node(address, nbytes, wanted.numa_node);
    if (wanted.populate) populate(address, nbytes);
    return region;
}

void Window::forget(std::uint64_t offset, std::uint64_t nbytes) const {
    if (offset > this->nbytes() || nbytes > this->nbytes() - offset) return;
    const std::uint64_t start = offset / base_page() * base_page();
    ::madvise(address() + start, offset + nbytes - start, MADV_DONTNEED);
}

int open_process(int process) {
    const long descriptor = ::syscall(kPidfdOpen, process, 0);
    if (descriptor < 0) fail(errno, "pidfd_open");
    return static_cast<int>(descriptor);
}

std::shared_ptr<Window> map_window(int descriptor, std::uint64_t nbytes) {
    struct stat found{};
    if (::fstat(descriptor, &found) != 0) fail(errno, "fstat");
    const int seals = ::fcntl(descriptor, kGetSeals);
    if (seals < 0 || (seals & kNoShrinking) == 0 || found.st_size < 0 ||
        static_cast<std::uint64_t>(found.st_size) < nbytes) {
        fail(EINVAL, "shared memory");
    }
    void* address = ::mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) fail(errno, "mmap");
    ::madvise(address, nbytes, MADV_DONTFORK);
    return std::make_shared<Window>(static_cast<std::byte*>(address), nbytes, Device{},
                                    [address, nbytes] { ::munmap(address, nbytes); });
}

std::uint64_t resident_bytes(const Region& region) {
    return resident_bytes(region.address(), region.nbytes());
}

std::uint64_t unbacked_bytes() { return Mappings::all().unbacked(); }

}  // namespace infinity::tiers
