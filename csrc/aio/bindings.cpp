// infinity._aio: the engine for Python. No thread of the engine ever takes the GIL, so everything
// that needs the GIL happens here, above all dropping the owners of buffers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <utility>

#include "engine.hpp"
#include "python_buffers.hpp"
#include "python_engine.hpp"
#include "python_errors.hpp"
#include "python_futures.hpp"
#include "stripe.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace infinity::aio;

namespace {

// ---- tables for people --------------------------------------------------------------------------

nb::dict stats_of(const PyEngine& self) {
    const Stats stats = self.core()->stats();
    nb::dict result;
    for (int kind = 0; kind < kinds; ++kind) {
        const std::string prefix = std::string(verb(static_cast<Kind>(kind))) + "_";
        const auto at = static_cast<size_t>(kind);
        result[(prefix + "requests").c_str()] = stats.requests[at];
        result[(prefix + "transfers").c_str()] = stats.transfers[at];
        result[(prefix + "busy_seconds").c_str()] = stats.busy_seconds[at];
        if (static_cast<Kind>(kind) != Kind::sync)
            result[(prefix + "bytes").c_str()] = stats.bytes[at];
    }
    result["failures"] = stats.failures;
    result["retries"] = stats.retries;
    result["short_transfers"] = stats.short_transfers;
    result["buffered_bytes"] = stats.buffered_bytes;
    result["verified_bytes"] = stats.verified_bytes;
    result["queue_peak"] = stats.queue_peak;
    result["in_flight_peak"] = stats.in_flight_peak;
    result["waits"] = stats.waits;
    return result;
}

nb::dict report_of(const BackendReport& report) {
    nb::dict result;
    result["name"] = report.name;
    result["ok"] = report.ok;
    result["direct"] = report.direct;
    result["reason"] = report.reason;
    result["features"] = report.features;
    return result;
}

nb::dict facts_of(const PyEngine& self) {
    const Facts facts = self.core()->facts();
    nb::dict result;
    nb::list rejected;
    for (const BackendReport& report : facts.rejected) rejected.append(report_of(report));
    result["chosen"] = report_of(facts.chosen);
    result["rejected"] = rejected;
    result["registered_bytes"] = facts.registered_bytes;
    result["registration_failure"] = facts.registration_failure;
    result["depth"] = self.core()->options().depth;
    result["block_bytes"] = self.core()->options().block_bytes;
    return result;
}

nb::dict probe_directory(std::optional<std::string> directory) {
    const DirectoryReport report = unlocked([&] { return probe(directory); });
    nb::dict result;
    nb::list backends;
    for (const BackendReport& backend : report.backends) backends.append(report_of(backend));
    result["direct"] = report.alignment.direct;
    result["memory_alignment"] = report.alignment.memory;
    result["offset_alignment"] = report.alignment.granularity;
    result["backends"] = backends;
    return result;
}

// ---- the module ---------------------------------------------------------------------------------

Kind kind_of(const std::string& name) {
    for (int kind = 0; kind < kinds; ++kind)
        if (name == verb(static_cast<Kind>(kind))) return static_cast<Kind>(kind);
    raise_config_error("There is no request kind '" + name + "'.", "Use read, write, sync or any.");
}

void add_rule(PyFaults& self, const std::string& kind, uint64_t nth, std::optional<uint64_t> times,
              std::optional<std::string> path, FaultRule rule) {
    if (kind != "any") rule.kind = kind_of(kind);
    if (nth == 0) raise_config_error("nth is 0.", "Requests are counted from 1.");
    rule.path = std::move(path);
    rule.nth = nth;
    rule.times = times.value_or(Faults::always);
    self.faults->add(std::move(rule));
}

nb::dict calls_by_kind(const PyFaults& self) {
    nb::dict result;
    const auto calls = self.faults->calls();
    for (int kind = 0; kind < kinds; ++kind)
        result[verb(static_cast<Kind>(kind))] = calls[static_cast<size_t>(kind)];
    return result;
}

uint64_t note(PyFaults& self, std::string kind, std::string path, std::string target,
              uint64_t offset, const nb::bytes& data) {
    if (!self.faults->recording().on()) return 0;
    Event event;
    event.kind = std::move(kind);
    event.path = std::move(path);
    event.target = std::move(target);
    event.offset = offset;
    const auto* first = static_cast<const std::byte*>(data.data());
    event.data = std::make_shared<const std::vector<std::byte>>(first, first + data.size());
    return self.faults->recording().begin(std::move(event));
}

nb::list recorded(const PyFaults& self) {
    const std::vector<Event> events = unlocked([&] { return self.faults->recording().events(); });
    nb::list result;
    for (const Event& event : events) {
        const bool ok = event.completed && event.result >= 0;
        const nb::bytes data =
            event.data ? nb::bytes(event.data->data(), event.data->size()) : nb::bytes("", 0);
        result.append(nb::make_tuple(event.kind, event.path, event.target, event.offset, data,
                                     event.submitted, event.completed, ok, ok ? event.result : 0,
                                     event.changed));
    }
    return result;
}

void bind_recording(nb::class_<PyFaults>& faults) {
    faults.def("record", [](PyFaults& self) { self.faults->recording().start(); })
        .def("note", &note, "kind"_a, "path"_a, "target"_a, "offset"_a, "data"_a)
        .def(
            "noted", [](PyFaults& self, uint64_t ticket) { self.faults->recording().end(ticket); },
            "ticket"_a)
        .def("recorded", &recorded)
        .def("clear_record", [](PyFaults& self) { self.faults->recording().clear(); });
}

void bind_faults(nb::module_& m) {
    auto faults = nb::class_<PyFaults>(m, "Faults");
    bind_recording(faults);
    faults.def(nb::init<>())
        .def(
            "fail",
            [](PyFaults& self, const std::string& kind, uint64_t nth, int error,
               std::optional<uint64_t> times, std::optional<std::string> path) {
                if (error <= 0)
                    raise_config_error("errno is not positive.", "Give errno.EIO or so.");
                FaultRule rule;
                rule.action = FaultRule::Action::fail;
                rule.error = error;
                add_rule(self, kind, nth, times, std::move(path), rule);
            },
            "kind"_a, "nth"_a, "errno"_a, "times"_a.none() = 1, "path"_a = nb::none())
        .def(
            "shorten",
            [](PyFaults& self, const std::string& kind, uint64_t nth, uint32_t bytes,
               std::optional<uint64_t> times, std::optional<std::string> path) {
                FaultRule rule;
                rule.action = FaultRule::Action::shorten;
                rule.bytes = bytes;
                add_rule(self, kind, nth, times, std::move(path), rule);
            },
            "kind"_a, "nth"_a, "nbytes"_a, "times"_a.none() = 1, "path"_a = nb::none())
        .def(
            "tear",
            [](PyFaults& self, uint64_t nth, uint32_t bytes, std::optional<uint64_t> times,
               std::optional<std::string> path) {
                FaultRule rule;
                rule.action = FaultRule::Action::tear;
                rule.bytes = bytes;
                add_rule(self, "write", nth, times, std::move(path), rule);
            },
            "nth"_a, "nbytes"_a = 0, "times"_a.none() = 1, "path"_a = nb::none())
        .def(
            "delay",
            [](PyFaults& self, const std::string& kind, uint64_t nth, double seconds,
               std::optional<uint64_t> times, std::optional<std::string> path) {
                FaultRule rule;
                rule.action = FaultRule::Action::delay;
                rule.delay = std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::duration<double>(seconds));
                add_rule(self, kind, nth, times, std::move(path), rule);
            },
            "kind"_a, "nth"_a, "seconds"_a, "times"_a.none() = 1, "path"_a = nb::none())
        .def(
            "hold",
            [](PyFaults& self, const std::string& kind, uint64_t nth, std::optional<uint64_t> times,
               std::optional<std::string> path) {
                FaultRule rule;
                rule.action = FaultRule::Action::hold;
                add_rule(self, kind, nth, times, std::move(path), rule);
            },
            "kind"_a, "nth"_a, "times"_a.none() = 1, "path"_a = nb::none())
        .def("release", [](PyFaults& self) { self.faults->release(); })
        .def("clear", [](PyFaults& self) { self.faults->clear(); })
        .def_prop_ro("calls", calls_by_kind)
        .def_prop_ro("fired", [](const PyFaults& self) { return self.faults->fired(); });
}

void bind_future(nb::module_& m) {
    nb::class_<PyTiming>(m, "Timing").def("times", &PyTiming::times);
    nb::class_<PyFuture>(m, "Future")
        .def("done", &PyFuture::done)
        .def_prop_ro("timing", &PyFuture::timing)
        .def("watcher", &PyFuture::watcher)
        .def(
            "wait",
            [](PyFuture& self, std::optional<double> timeout) {
                if (!self.landed_by(limit_of(timeout))) return false;
                self.check();
                return true;
            },
            "timeout"_a = nb::none())
        .def(
            "result",
            [](PyFuture& self, std::optional<double> timeout) {
                if (!self.landed_by(limit_of(timeout))) raise_timeout();
                self.check();
                return self.bytes();
            },
            "timeout"_a = nb::none())
        .def(
            "exception",
            [](PyFuture& self, std::optional<double> timeout) {
                if (!self.landed_by(limit_of(timeout))) raise_timeout();
                return self.error();
            },
            "timeout"_a = nb::none());
    m.def("wait_all", &wait_all, "futures"_a, "timeout"_a = nb::none());
    m.def("wait_for_dropped", &wait_for_dropped);
}

template <typename Self>
void bind_requests(nb::class_<Self>& target) {
    target
        .def(
            "read",
            [](const Self& self, nb::handle buffer, int64_t offset, std::optional<double> deadline,
               nb::object describe) {
                return start(Kind::read, self, span_of(buffer, true), offset, deadline,
                             std::move(describe));
            },
            "buffer"_a.none(), "offset"_a, "deadline"_a = nb::none(), "describe"_a = nb::none())
        .def(
            "write",
            [](const Self& self, nb::handle buffer, int64_t offset,
               std::optional<double> deadline) {
                return start(Kind::write, self, span_of(buffer, false), offset, deadline);
            },
            "buffer"_a.none(), "offset"_a, "deadline"_a = nb::none())
        .def(
            "sync",
            [](const Self& self, std::optional<double> deadline) {
                return start(Kind::sync, self, Span{}, 0, deadline);
            },
            "deadline"_a = nb::none());
}

void bind_file(nb::module_& m) {
    auto file = nb::class_<PyFile>(m, "File");
    bind_requests(file);
    const auto alive = [](const PyFile& self) -> const File& {
        check_usable(self, Kind::read);
        return *self.file;
    };
    file.def("close", &close_file)
        .def_prop_ro("closed", [](const PyFile& self) { return !self.file; })
        .def_ro("path", &PyFile::path)
        .def_ro("writable", &PyFile::writable)
        .def_prop_ro("size", [=](const PyFile& self) { return alive(self).size(); })
        .def_prop_ro("direct", [=](const PyFile& self) { return alive(self).alignment().direct; })
        .def_prop_ro("memory_alignment",
                     [=](const PyFile& self) { return alive(self).alignment().memory; })
        .def_prop_ro("offset_alignment",
                     [=](const PyFile& self) { return alive(self).alignment().granularity; })
        .def("__enter__", [](nb::object self) { return self; })
        .def("__exit__", [](PyFile& self, nb::args) { close_file(self); });
}

void bind_engine(nb::module_& m) {
    nb::class_<PyEngine>(m, "Engine")
        .def("__init__", &make_engine, "directory"_a.none(), "backend"_a, "depth"_a,
             "block_bytes"_a, "write_slack"_a, "faults"_a.none())
        .def(
            "open",
            [](const PyEngine& self, const std::string& path, bool write, bool verify) {
                const std::shared_ptr<Engine> engine = self.core();
                if (engine->closed())
                    raise_config_error("The I/O engine is closed.", "Make a new one.");
                std::shared_ptr<File> file =
                    unlocked([&] { return engine->open(path, write, verify); });
                return PyFile{std::move(file), engine, path, write};
            },
            "path"_a, "write"_a = true, "verify"_a = false)
        .def(
            "register_buffer",
            [](const PyEngine& self, uintptr_t address, uint64_t bytes) {
                if (address == 0 || bytes == 0)
                    raise_config_error("The buffer to register is empty.",
                                       "Give address and size.");
                auto* memory = reinterpret_cast<std::byte*>(address);
                const std::shared_ptr<Engine> engine = self.core();
                return unlocked([&] { return engine->register_buffer(memory, bytes); });
            },
            "address"_a, "nbytes"_a)
        .def("close", &PyEngine::close)
        .def_prop_ro("closed", [](const PyEngine& self) { return self.core()->closed(); })
        .def("_stats", &stats_of)
        .def("_facts", &facts_of);
}

void bind_volume(nb::module_& m) {
    nb::class_<StripeMap>(m, "StripeMap")
        .def(
            "__init__",
            [](StripeMap* self, const std::vector<uint32_t>& weights, uint64_t stripe_bytes,
               uint64_t base) {
                new (self)
                    StripeMap(unlocked([&] { return StripeMap(weights, stripe_bytes, base); }));
            },
            "weights"_a, "stripe_bytes"_a, "base"_a = 0)
        .def_prop_ro("weights",
                     [](const StripeMap& self) { return nb::tuple(nb::cast(self.weights())); })
        .def_prop_ro("period",
                     [](const StripeMap& self) { return nb::tuple(nb::cast(self.period())); })
        .def_prop_ro("stripe_bytes", &StripeMap::stripe_bytes)
        .def_prop_ro("base", &StripeMap::base)
        .def(
            "extents",
            [](const StripeMap& self, int64_t offset, int64_t bytes) {
                if (bytes < 0) raise_config_error("nbytes is negative.", "Give 0 or more bytes.");
                const uint64_t first = offset_of(offset, static_cast<uint64_t>(bytes), self.base());
                std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> result;
                for (const Extent& extent : self.extents(first, static_cast<uint64_t>(bytes)))
                    result.emplace_back(extent.file, extent.offset, extent.bytes);
                return result;
            },
            "offset"_a, "nbytes"_a);
    auto volume = nb::class_<PyVolume>(m, "Volume");
    volume
        .def(
            "__init__",
            [](PyVolume* self, const nb::list& files, const StripeMap& map) {
                std::vector<PyFile*> pointers;
                for (nb::handle file : files) pointers.push_back(nb::cast<PyFile*>(file));
                if (pointers.size() != map.weights().size())
                    raise_config_error("A volume needs one weight for each file.",
                                       "Give (file, weight) pairs.");
                new (self) PyVolume{map, std::move(pointers), nb::tuple(files)};
            },
            "files"_a, "map"_a)
        .def_prop_ro("files", [](const PyVolume& self) { return self.files_object; })
        .def_prop_ro("map", [](const PyVolume& self) -> const StripeMap& { return self.map; });
    bind_requests(volume);
}

}  // namespace

NB_MODULE(_aio, m) {
    m.doc() = "The native I/O engine. Use infinity.aio.";
    // A daemon thread may hold objects of this module to the very end, so leaks are not reported.
    nb::set_leak_warnings(false);
    // No thread that waits exists in a forked child.
    pthread_atfork(nullptr, nullptr, [] { infinity::waiting = 0; });
    bind_faults(m);
    bind_future(m);
    bind_file(m);
    bind_engine(m);
    bind_volume(m);
    m.def("probe", &probe_directory, "directory"_a.none());
    m.def("_leave", &leave);
}
