// Engines, files and volumes as Python holds them, and how their requests start.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "python_buffers.hpp"
#include "python_errors.hpp"
#include "python_futures.hpp"
#include "stripe.hpp"

namespace infinity::aio {

namespace nb = nanobind;
using namespace nb::literals;

struct PyFaults {
    std::shared_ptr<Faults> faults = std::make_shared<Faults>();
};

class PyEngine {
  public:
    explicit PyEngine(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
    PyEngine(PyEngine&&) = default;
    ~PyEngine() {
        if (!engine_ || engine_.use_count() > 1 || engine_->forked() || engine_->closed()) return;
        close();
    }

    const std::shared_ptr<Engine>& core() const {
        if (engine_->forked()) raise_forked();
        return engine_;
    }
    void close() {
        if (engine_->forked()) return;
        unlocked([&] { engine_->close(); });
        orphans().reap(true);
    }

  private:
    std::shared_ptr<Engine> engine_;
};

// All open engines, for the end of the interpreter. Guarded by the GIL.
inline std::vector<std::weak_ptr<Engine>>& engines() {
    static auto* const instance = new std::vector<std::weak_ptr<Engine>>;
    return *instance;
}

inline void make_engine(PyEngine* self, std::optional<std::string> directory, std::string backend,
                        unsigned depth, uint32_t block_bytes, double write_slack,
                        std::optional<PyFaults*> faults) {
    Options options;
    options.directory = std::move(directory);
    options.backend = std::move(backend);
    options.depth = depth;
    options.block_bytes = block_bytes;
    options.write_slack = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(write_slack));
    if (faults) options.faults = (*faults)->faults;
    std::shared_ptr<Engine> engine = unlocked([&] { return Engine::create(std::move(options)); });
    std::erase_if(engines(), [](const std::weak_ptr<Engine>& known) { return known.expired(); });
    engines().push_back(engine);
    new (self) PyEngine(std::move(engine));
}

// Registered with atexit. Engines must not meet the end of the interpreter with requests in flight,
// whose memory would be freed while the kernel uses it. Nor may a thread come back from a wait to
// an interpreter that is being taken down.
inline void leave() {
    for (const std::weak_ptr<Engine>& known : engines()) {
        const std::shared_ptr<Engine> engine = known.lock();
        if (engine && !engine->forked()) unlocked([&] { engine->close(); });
    }
    orphans().reap(true);
    see_waits_out(std::chrono::seconds(5));
}

struct PyFile {
    std::shared_ptr<File> file;
    std::shared_ptr<Engine> engine;
    std::string path;  // outlives the file
    bool writable = false;
};

inline void check_usable(const PyFile& self, Kind kind) {
    if (self.engine->forked()) raise_forked();
    if (!self.file) raise_config_error(self.path + " is closed.", "Open it again before using it.");
    if (self.engine->closed())
        raise_config_error("The I/O engine of " + self.path + " is closed.",
                           "Make a new engine and open the file there.");
    if (kind == Kind::write && !self.writable)
        raise_config_error(self.path + " was opened for reading only.", "Open it with write=True.");
}

inline TimePoint deadline_of(const Engine& engine, Kind kind, std::optional<double> deadline) {
    if (!deadline || std::isnan(*deadline)) return Clock::now() + engine.slack(kind);
    const double seconds = std::min(std::max(*deadline, -1e9), 1e9);
    return TimePoint(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

// base: bytes that are added to the offset later.
inline uint64_t offset_of(int64_t offset, uint64_t bytes, uint64_t base = 0) {
    if (offset < 0)
        raise_config_error("The offset is " + std::to_string(offset) + ".",
                           "Give 0 or more bytes.");
    const uint64_t most = static_cast<uint64_t>(INT64_MAX) - base;
    if (bytes > most || static_cast<uint64_t>(offset) > most - bytes)
        raise_config_error("The range ends beyond 2^63 bytes.", "Give a smaller offset.");
    return static_cast<uint64_t>(offset);
}

inline std::unique_ptr<Request> make_request(Kind kind, const PyFile& file, const Range& range,
                                             std::optional<double> deadline,
                                             const std::shared_ptr<Future>& future,
                                             const std::byte* memory) {
    auto request = std::make_unique<Request>();
    request->kind = kind;
    request->file = file.file;
    request->left = range;
    request->deadline = deadline_of(*file.engine, kind, deadline);
    request->future = future;
    request->memory = memory;
    return request;
}

inline PyFuture start(Kind kind, const PyFile& self, Span span, int64_t offset,
                      std::optional<double> deadline, nb::object describe = nb::none()) {
    check_usable(self, kind);
    orphans().reap(false);
    const Range range{span.address, offset_of(offset, span.bytes), span.bytes};
    const bool something = kind == Kind::sync || span.bytes > 0;
    auto future = std::make_shared<Future>(something ? 1 : 0, span.bytes);
    if (something) {
        std::vector<std::unique_ptr<Request>> requests;
        requests.push_back(make_request(kind, self, range, deadline, future, span.address));
        self.engine->submit(std::move(requests));
    }
    return {std::move(future), std::move(span.owner), {self.engine}, std::move(describe)};
}

inline void close_file(PyFile& self) {
    if (!self.file || self.engine->forked()) return;
    std::shared_ptr<File> file = std::move(self.file);
    unlocked([&] {
        self.engine->close_file(file);
        file.reset();
    });
    orphans().reap(true);
}

struct PyVolume {
    StripeMap map;
    std::vector<PyFile*> files;  // kept alive by files_object
    nb::object files_object;
};

inline PyFuture start(Kind kind, const PyVolume& self, Span span, int64_t offset,
                      std::optional<double> deadline, nb::object describe = nb::none()) {
    for (const PyFile* file : self.files) check_usable(*file, kind);
    orphans().reap(false);
    std::vector<Extent> extents;
    if (kind == Kind::sync) {
        for (uint32_t file = 0; file < self.files.size(); ++file) extents.push_back({file, 0, 0});
    } else {
        extents = self.map.extents(offset_of(offset, span.bytes, self.map.base()), span.bytes);
    }
    auto future = std::make_shared<Future>(static_cast<uint32_t>(extents.size()), span.bytes);
    std::vector<std::vector<std::unique_ptr<Request>>> requests(self.files.size());
    std::byte* address = span.address;
    for (const Extent& extent : extents) {
        requests[extent.file].push_back(make_request(kind, *self.files[extent.file],
                                                     {address, extent.offset, extent.bytes},
                                                     deadline, future, span.address));
        address += extent.bytes;
    }
    std::vector<std::shared_ptr<Engine>> held;
    for (size_t file = 0; file < requests.size(); ++file) {
        if (requests[file].empty()) continue;
        held.push_back(self.files[file]->engine);
        held.back()->submit(std::move(requests[file]));
    }
    return {std::move(future), std::move(span.owner), std::move(held), std::move(describe)};
}

}  // namespace infinity::aio
