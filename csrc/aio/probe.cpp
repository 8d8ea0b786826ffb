#include "probe.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "file.hpp"
#include "quiet_thread.hpp"

namespace infinity::aio {
namespace {

constexpr std::chrono::seconds patience{30};

// Makes a file without a name, or a file whose name is removed before this function returns.
std::shared_ptr<File> temporary_file(const std::optional<std::string>& directory, bool direct) {
    const auto adopt = [direct](int descriptor) {
        std::shared_ptr<File> file;
        try {
            file = File::open("/proc/self/fd/" + std::to_string(descriptor), true, direct);
        } catch (...) {
            ::close(descriptor);
            throw;
        }
        ::close(descriptor);
        return file;
    };
    if (!directory) {
        const int descriptor = memfd_create("infinity-probe", MFD_CLOEXEC);
        if (descriptor < 0) throw Unavailable(describe_errno("memfd_create", errno));
        return adopt(descriptor);
    }
    const int descriptor = ::open(directory->c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor >= 0) return adopt(descriptor);
    if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)
        throw StorageFailure({"create a file in", *directory, {}, errno});
    std::string path = *directory + "/.infinity-probe-XXXXXX";
    const int named = mkostemp(path.data(), O_CLOEXEC);
    if (named < 0) throw StorageFailure({"create a file in", *directory, {}, errno});
    ::close(named);
    std::shared_ptr<File> file;
    try {
        file = File::open(path, true, direct);
    } catch (...) {
        ::unlink(path.c_str());
        throw;
    }
    ::unlink(path.c_str());
    return file;
}

// Everything that a transfer touches. It lives on the heap, and is leaked if the kernel never
// answers.
struct Trip {
    std::unique_ptr<Backend> backend;
    std::shared_ptr<File> file;
    std::unique_ptr<std::byte, decltype(&std::free)> memory{nullptr, &std::free};
    uint32_t bytes = 0;  // bytes of each half of the memory: one is written, one is read

    int64_t transfer(Kind kind, bool direct) {
        Transfer transfer;
        transfer.kind = kind;
        transfer.direct = direct;
        transfer.file = file.get();
        transfer.address = memory.get() + (kind == Kind::read ? bytes : 0);
        transfer.bytes = kind == Kind::sync ? 0 : bytes;
        const TimePoint limit = Clock::now() + patience;
        std::vector<Completion> done;
        backend->submit(transfer);
        while (done.empty()) {
            if (Clock::now() >= limit) return -ETIMEDOUT;
            backend->wait(limit, true, done);
        }
        return done.front().result;
    }
};

// Tries a write and a read. Returns an empty string, or why the round trip failed.
std::string round_trip(const std::string& name, const std::shared_ptr<File>& file, bool direct,
                       std::string& features) {
    auto trip = std::make_unique<Trip>();
    trip->backend = make_backend(name, 1);
    trip->backend->start();
    features = trip->backend->features();
    trip->file = file;
    const uint32_t unit = std::max<uint32_t>(file->alignment().granularity, 4096);
    trip->bytes = 2 * unit;
    trip->memory.reset(static_cast<std::byte*>(std::aligned_alloc(unit, 2 * trip->bytes)));
    if (!trip->memory) throw std::bad_alloc();
    for (uint32_t i = 0; i < trip->bytes; ++i)
        trip->memory.get()[i] = static_cast<std::byte>(i * 131 + i / 4096 + 1);
    std::memset(trip->memory.get() + trip->bytes, 0, trip->bytes);
    for (const Kind kind : {Kind::write, Kind::sync, Kind::read}) {
        const int64_t result = trip->transfer(kind, direct);
        const auto error = static_cast<int>(-result);
        if (error == ETIMEDOUT) {
            (void)trip.release();
            return std::string("a ") + verb(kind) + " did not come back within 30 s";
        }
        if (error == ENOSPC || error == EDQUOT)
            throw StorageFailure({"write a probe file at", file->path(), {}, error});
        const char* how = direct ? "O_DIRECT " : "buffered ";
        if (result < 0) return describe_errno(std::string(how) + verb(kind), error);
        if (kind != Kind::sync && result != trip->bytes)
            return std::string("a short ") + how + verb(kind);
    }
    if (std::memcmp(trip->memory.get(), trip->memory.get() + trip->bytes, trip->bytes) != 0)
        return "it read back other bytes than it wrote";
    return "";
}

BackendReport try_backend(const std::string& name, const std::shared_ptr<File>& file) {
    BackendReport report;
    report.name = name;
    try {
        std::string not_direct = "no O_DIRECT on this file system: I/O goes through the page cache";
        if (file->alignment().direct) {
            not_direct = round_trip(name, file, true, report.features);
            report.direct = not_direct.empty();
        }
        report.reason = report.direct ? "" : round_trip(name, file, false, report.features);
        report.ok = report.reason.empty();
        if (report.ok) report.reason = not_direct;
    } catch (const Unavailable& unavailable) {
        report.reason = unavailable.what();
    }
    return report;
}

// Tries a backend on a thread of its own: io_uring gives every task that uses it kernel workers,
// which stay until the task ends. The calling task should not get any.
BackendReport try_aside(const std::string& name, const std::shared_ptr<File>& file) {
    BackendReport report;
    std::exception_ptr thrown;
    quiet_thread([&] {
        try {
            report = try_backend(name, file);
        } catch (...) {
            thrown = std::current_exception();
        }
    }).join();
    if (thrown) std::rethrow_exception(thrown);
    return report;
}

// Runs the action, and names the directory in its failures, as the caller knows it, in place of a
// descriptor.
template <typename Action>
auto naming(const std::optional<std::string>& directory, const Action& action) {
    try {
        return action();
    } catch (const StorageFailure& failure) {
        Failure named = failure.failure();
        if (directory) named.path = *directory;
        throw StorageFailure(std::move(named));
    }
}

}  // namespace

DirectoryReport probe(const std::optional<std::string>& directory) {
    return naming(directory, [&] {
        const std::shared_ptr<File> file = temporary_file(directory, true);
        DirectoryReport report{file->alignment(), {}};
        for (const char* name : backend_names) report.backends.push_back(try_aside(name, file));
        return report;
    });
}

BackendReport choose(const std::optional<std::string>& directory, const std::string& name,
                     std::vector<BackendReport>& rejected) {
    return naming(directory, [&] {
        const bool any = name == "auto";
        const std::shared_ptr<File> file = temporary_file(directory, true);
        for (const char* candidate : backend_names) {
            if (!any && name != candidate) continue;
            BackendReport report = try_aside(candidate, file);
            if (report.ok) return report;
            rejected.push_back(std::move(report));
        }
        if (rejected.empty()) make_backend(name, 1);  // throws: there is no such name
        std::string reasons;
        for (const BackendReport& report : rejected)
            reasons += (reasons.empty() ? "" : "; ") + report.name + ": " + report.reason;
        throw Unavailable(reasons);
    });
}

}  // namespace infinity::aio
