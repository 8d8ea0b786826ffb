// infinity._driver: a device through the table of driver calls, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "driver.hpp"
#include "python_leaving.hpp"
#include "python_typed_errors.hpp"
#include "repeated.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace infinity::driver;  // NOLINT: one small translation unit about one namespace

namespace {

// Asks `done` until the answer is yes, without the GIL. The driver's own waits are not used, since
// a person's Ctrl-C must end the wait. The first questions follow at once, for a copy that is
// nearly done. Later ones are apart, for a longer copy does not need a core to itself.
template <typename Done>
void wait_until(const Done& done) {
    using namespace std::chrono_literals;
    constexpr int kAtOnce = 256;
    constexpr auto kLongest = 200us;
    constexpr auto kBetweenSignals = 50ms;
    const infinity::Waiting in_a_wait;
    const nb::gil_scoped_release without_gil;
    auto pause = 5us;
    auto looked = std::chrono::steady_clock::now();
    for (int asked = 0; !done() && !infinity::leaving; ++asked) {
        if (asked >= kAtOnce) {
            std::this_thread::sleep_for(pause);
            pause = std::min<std::chrono::microseconds>(pause * 2, kLongest);
        }
        if (asked % 64 == 63 && std::chrono::steady_clock::now() - looked > kBetweenSignals) {
            const nb::gil_scoped_acquire gil;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            looked = std::chrono::steady_clock::now();
        }
    }
}

std::shared_ptr<Driver> load_driver(const std::string& path, int device) {
    std::string reason;
    try {
        const nb::gil_scoped_release without_gil;
        return std::make_shared<Driver>(load(path), device);
    } catch (const Unloadable& error) {
        reason = error.what();
    }
    infinity::raise_config_error("The library of driver calls cannot be used: " + reason + ".",
                                 "Install the NVIDIA driver, or give device=\"cpu\".");
}

// Queues a whole transfer in one call: the wait for `after`, the copy and the record of its event.
std::shared_ptr<Event> transfer(const Stream& self, Address into, Address source,
                                std::size_t nbytes, const Event* after, std::size_t piece,
                                bool timing) {
    if (after != nullptr) self.wait(*after);
    self.copy(into, source, nbytes, piece);
    return self.record(timing);
}

std::shared_ptr<SharedMemory> open_shared(const std::shared_ptr<Driver>& self, nb::bytes handle) {
    SharedHandle given{};
    if (handle.size() != sizeof given.bytes) throw nb::value_error("a handle has 64 bytes");
    std::memcpy(given.bytes, handle.data(), sizeof given.bytes);
    const nb::gil_scoped_release without_gil;
    return std::make_shared<SharedMemory>(self, given);
}

void touched_by_host(const Driver& self, Address address, std::size_t nbytes, bool writes,
                     const std::string& label) {
    if (self.checked())
        self.table().touched(nullptr, 1, address, nbytes, writes ? 1 : 0, label.c_str());
}

void bind_streams(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> without_gil;
    nb::class_<Event>(m, "Event")
        .def("done", &Event::done)
        .def("synchronize", [](const Event& self) { wait_until([&] { return self.done(); }); })
        .def("milliseconds_since", &Event::milliseconds_since, "earlier"_a);

    nb::class_<Stream>(m, "Stream")
        .def_prop_ro(
            "handle",
            [](const Stream& self) { return reinterpret_cast<std::uintptr_t>(self.handle()); })
        .def("wait", &Stream::wait, "event"_a, without_gil)
        .def("record", &Stream::record, "timing"_a = false, without_gil)
        .def("done", &Stream::done)
        .def("synchronize", [](const Stream& self) { wait_until([&] { return self.done(); }); })
        .def("copy", &Stream::copy, "into"_a, "source"_a, "nbytes"_a, nb::kw_only(), "piece"_a = 0,
             without_gil)
        .def("transfer", &transfer, "into"_a, "source"_a, "nbytes"_a, nb::kw_only(),
             "after"_a = nb::none(), "piece"_a = 0, "timing"_a = false, without_gil)
        .def(
            "touched",
            [](const Stream& self, Address address, std::size_t nbytes, bool writes,
               const std::string& label) { self.touched(address, nbytes, writes, label.c_str()); },
            "address"_a, "nbytes"_a, nb::kw_only(), "writes"_a, "label"_a = "", without_gil);
}

nb::capsule capsule_of(CopiesAround& self) {
    using Held = std::vector<std::shared_ptr<infinity::JobHooks>>;
    return {new Held(self.hooks()), infinity::kJobHooks,
            [](void* held) noexcept { delete static_cast<Held*>(held); }};
}

// up: (stream, after, [(into, source, nbytes) of each job], piece, timing). uses: [(address,
// nbytes, writes)] of each job.
using CopyTuple = std::tuple<Address, Address, std::size_t>;
using UpTuple = std::tuple<std::shared_ptr<Stream>, std::shared_ptr<Event>, std::vector<CopyTuple>,
                           std::size_t, bool>;
using UseTuple = std::tuple<Address, std::size_t, bool>;

std::shared_ptr<CopiesAround> copies_around(std::shared_ptr<Driver> driver,
                                            std::vector<std::shared_ptr<Event>> downs,
                                            const std::optional<UpTuple>& up,
                                            const std::vector<std::vector<UseTuple>>& uses,
                                            std::string label) {
    std::optional<CopiesAround::Up> ups;
    if (up) {
        const auto& [stream, after, places, piece, timing] = *up;
        std::vector<CopiesAround::Copy> copies;
        copies.reserve(places.size());
        for (const auto& [into, source, nbytes] : places) copies.push_back({into, source, nbytes});
        ups = CopiesAround::Up{stream, after, std::move(copies), piece, timing};
    }
    std::vector<std::vector<CopiesAround::Use>> used;
    for (const auto& of_job : uses) {
        used.emplace_back();
        for (const auto& each : of_job)
            used.back().push_back(std::make_from_tuple<CopiesAround::Use>(each));
    }
    return std::make_shared<CopiesAround>(std::move(driver), std::move(downs), std::move(ups),
                                          std::move(used), std::move(label));
}

void bind_copies_around(nb::module_& m) {
    nb::class_<CopiesAround>(m, "CopiesAround")
        .def(nb::new_(&copies_around), "driver"_a, "downs"_a, "up"_a.none(), "uses"_a, "label"_a)
        .def_prop_ro("capsule", &capsule_of)
        .def(
            "before",
            [](CopiesAround& self, std::size_t job) {
                return self.before(job) == infinity::JobHooks::State::happened;
            },
            "job"_a)
        .def("after", &CopiesAround::after, "job"_a)
        .def("events", &CopiesAround::events)
        .def("check", &CopiesAround::check);
}

void bind_functions(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> without_gil;
    nb::class_<Function>(m, "Function")
        .def(
            "launch",
            [](const Function& self, const Stream& stream, unsigned grid, unsigned block,
               nb::bytes arguments) {
                const void* data = arguments.data();
                const std::size_t nbytes = arguments.size();
                const nb::gil_scoped_release release;
                self.launch(stream, grid, block, data, nbytes);
            },
            "stream"_a, "grid"_a, "block"_a, "arguments"_a);

    nb::class_<Module>(m, "Module").def("function", &Module::function, "name"_a, without_gil);
}

void bind_driver(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> without_gil;
    nb::class_<RepeatedMemory>(m, "RepeatedMemory")
        .def_prop_ro("address", &RepeatedMemory::address)
        .def("release", &RepeatedMemory::release, without_gil);

    nb::class_<SharedMemory>(m, "SharedMemory")
        .def_prop_ro("address", &SharedMemory::address)
        .def("close", &SharedMemory::close, without_gil);

    nb::class_<Driver>(m, "Driver")
        .def_static("load", &load_driver, "path"_a, "device"_a = 0)
        .def_prop_ro("checked", &Driver::checked)
        .def(
            "stream",
            [](const std::shared_ptr<Driver>& self, int priority) {
                return std::make_shared<Stream>(self, priority);
            },
            "priority"_a = 0, without_gil)
        .def(
            "foreign",
            [](const std::shared_ptr<Driver>& self, std::uintptr_t handle) {
                return std::make_shared<Stream>(self, reinterpret_cast<StreamHandle>(handle));
            },
            "handle"_a)
        .def(
            "module",
            [](const std::shared_ptr<Driver>& self, nb::bytes image) {
                const std::string text(static_cast<const char*>(image.data()), image.size());
                const nb::gil_scoped_release release;
                return std::make_shared<Module>(self, text);
            },
            "image"_a)
        .def("synchronize", &Driver::synchronize, without_gil)
        .def_prop_ro("granularity", [](const Driver& self) { return granularity(self); })
        .def(
            "repeat",
            [](const std::shared_ptr<Driver>& self, std::size_t chunk, std::size_t count,
               unsigned char value) {
                return std::make_shared<RepeatedMemory>(self, chunk, count, value);
            },
            "chunk"_a, "count"_a, "value"_a, without_gil)
        .def("register_host", &Driver::register_host, "address"_a, "nbytes"_a, without_gil)
        .def("unregister_host", &Driver::unregister_host, "address"_a, without_gil)
        .def(
            "share",
            [](Driver& self, Address address) {
                const Driver::Shared found = self.share(address);
                return nb::make_tuple(nb::bytes(found.handle.bytes, sizeof found.handle.bytes),
                                      found.offset);
            },
            "address"_a)
        .def("open_shared", &open_shared, "handle"_a)
        .def("touched_by_host", &touched_by_host, "address"_a, "nbytes"_a, nb::kw_only(),
             "writes"_a, "label"_a = "", without_gil);
}

}  // namespace

NB_MODULE(_driver, m) {
    // Events and streams may outlive the teardown of the interpreter by design, so leaks are not
    // reported.
    nb::set_leak_warnings(false);
    nb::register_exception_translator([](const std::exception_ptr& pending, void*) {
        try {
            std::rethrow_exception(pending);
        } catch (const CallFailed& error) {
            infinity::set_error(infinity::errors_of("device_error")(error.call(), error.code(),
                                                                    error.name(), error.text()));
        }
    });
    m.def("_leave", [] { infinity::see_waits_out(std::chrono::seconds(2)); });
    bind_streams(m);
    bind_functions(m);
    bind_driver(m);
    bind_copies_around(m);
}
