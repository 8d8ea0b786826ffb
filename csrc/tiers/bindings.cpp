// infinity._tiers: regions, boards, mail, pools, leases, spans for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <system_error>
#include <variant>

#include "board.hpp"
#include "dlpack.hpp"
#include "mail.hpp"
#include "pool.hpp"
#include "python_leaving.hpp"

namespace nb = nanobind;
using namespace infinity::tiers;  // NOLINT: one small translation unit about one namespace

namespace {

// What a Storage over a lease or a region owns, see [Note: a residency is a Storage] in
// infinity/tiers/pool.py. torch calls the deleter when the last view dies, on any thread, with or
// without the GIL. The deleter is plain C++.
struct Residency {
    DLManagedTensor managed{};
    std::int64_t shape = 0;
    std::int64_t stride = 1;
    std::shared_ptr<void> memory;
};

void drop_capsule(PyObject* capsule) {
    // torch renames a capsule that it has taken over ("used_dltensor").
    if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
}

// `Memory` is a Lease or a Region.
template <typename Memory>
nb::object to_dlpack(std::shared_ptr<Memory> memory) {
    auto residency = std::make_unique<Residency>();
    residency->shape = static_cast<std::int64_t>(memory->nbytes());
    const Device device = memory->device();
    DLTensor& tensor = residency->managed.dl_tensor;
    tensor.data = memory->address();
    tensor.device = {static_cast<std::int32_t>(device.kind), device.index};
    tensor.ndim = 1;
    tensor.dtype = {1, 8, 1};
    tensor.shape = &residency->shape;
    tensor.strides = &residency->stride;
    residency->memory = std::move(memory);
    residency->managed.manager_ctx = residency.get();
    residency->managed.deleter = [](DLManagedTensor* self) {
        delete static_cast<Residency*>(self->manager_ctx);
    };
    PyObject* capsule = PyCapsule_New(&residency->managed, "dltensor", drop_capsule);
    if (capsule == nullptr) throw nb::python_error();
    residency.release();  // the capsule owns it now
    return nb::steal(capsule);
}

// A Python handle on a lease. `release` gives up the share of this handle early.
class LeaseHandle {
  public:
    explicit LeaseHandle(std::shared_ptr<Lease> lease) : lease_(std::move(lease)) {}
    const std::shared_ptr<Lease>& get() const {
        if (!lease_) throw nb::value_error("the lease was released");
        return lease_;
    }
    void release() { lease_.reset(); }

  private:
    std::shared_ptr<Lease> lease_;
};

std::chrono::nanoseconds to_timeout(double seconds) {
    constexpr double kYear = 3.2e7;  // no overflow of the clock, and longer than anybody waits
    return std::chrono::nanoseconds(
        static_cast<std::int64_t>(std::clamp(seconds, 0.0, kYear) * 1e9));
}

// Returns a lease, or the reason why there is none.
std::variant<LeaseHandle, Refusal> lease(Pool& pool, std::uint64_t nbytes, double timeout) {
    std::shared_ptr<Lease> granted;
    Refusal refusal;
    bool signalled = false;
    const auto interrupted = [&signalled] {
        if (infinity::leaving) return true;
        const nb::gil_scoped_acquire gil;
        signalled = PyErr_CheckSignals() != 0;
        return signalled;
    };
    {
        const infinity::Waiting in_a_wait;
        const nb::gil_scoped_release without_gil;
        granted = pool.lease(nbytes, {to_timeout(infinity::leaving ? 0 : timeout), interrupted},
                             &refusal);
    }
    if (signalled) throw nb::python_error();
    if (!granted) return refusal;
    return LeaseHandle(std::move(granted));
}

// Holds a Python object that the last thread to let go of a region drops or calls. At the end of
// the interpreter nothing is done: the memory goes with the process.
class Keeper {
  public:
    explicit Keeper(nb::object object) : object_(object.release().ptr()) {}
    void drop() const {
        if (!nb::is_alive()) return;
        const nb::gil_scoped_acquire gil;
        Py_DECREF(object_);
    }
    void call_and_drop() const {
        if (!nb::is_alive()) return;
        const nb::gil_scoped_acquire gil;
        PyObject* result = PyObject_CallNoArgs(object_);
        if (result == nullptr) PyErr_WriteUnraisable(object_);
        Py_XDECREF(result);
        Py_DECREF(object_);
    }

  private:
    PyObject* object_;
};

std::shared_ptr<Region> adopt(std::uint64_t address, std::uint64_t nbytes, int device_kind,
                              int device_index, nb::object owner) {
    const Keeper kept(std::move(owner));
    return std::make_shared<Region>(
        reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address)), nbytes,
        Device{static_cast<DeviceKind>(device_kind), device_index}, [kept] { kept.drop(); });
}

nb::dict counters(const Pool& pool) {
    const PoolCounters now = pool.counters();
    nb::dict result;
    result["leased"] = now.leased;
    result["peak"] = now.peak;
    result["leases"] = now.leases;
    result["granted"] = now.granted;
    result["waits"] = now.waits;
    result["refused"] = now.refused;
    result["returns"] = now.returns;
    return result;
}

void bind_region(nb::module_& m) {
    nb::class_<Region>(m, "Region")
        .def_prop_ro(
            "address",
            [](const Region& self) { return reinterpret_cast<std::uintptr_t>(self.address()); })
        .def_prop_ro("nbytes", &Region::nbytes)
        .def_prop_ro("descriptor", &Region::descriptor)
        .def("close_descriptor", &Region::close_descriptor)
        .def("resident_bytes", [](const Region& self) { return resident_bytes(self); })
        .def("to_dlpack", [](std::shared_ptr<Region> self) { return to_dlpack(std::move(self)); })
        .def(
            "before_release",
            [](Region& self, nb::object undo) {
                const Keeper kept(std::move(undo));
                self.before_release([kept] { kept.call_and_drop(); });
            },
            nb::arg("undo"));
    nb::class_<Window, Region>(m, "Window")
        .def("forget", &Window::forget, nb::arg("offset"), nb::arg("nbytes"));
    m.def("unbacked_bytes", &unbacked_bytes);
    m.def(
        "map_host",
        [](std::uint64_t nbytes, bool huge_pages, int numa_node, bool populate, bool shared) {
            const nb::gil_scoped_release without_gil;
            return map_host({nbytes, huge_pages ? HugePages::advise : HugePages::never, numa_node,
                             populate, shared});
        },
        nb::arg("nbytes"), nb::kw_only(), nb::arg("huge_pages"), nb::arg("numa_node") = -1,
        nb::arg("populate") = false, nb::arg("shared") = false);
    m.def("open_process", &open_process, nb::arg("process"));
    m.def("map_window", &map_window, nb::arg("descriptor"), nb::arg("nbytes"));
    m.def("adopt", &adopt, nb::arg("address"), nb::arg("nbytes"), nb::kw_only(),
          nb::arg("device_kind"), nb::arg("device_index"), nb::arg("owner"));
}

void bind_board(nb::module_& m) {
    nb::class_<Board>(m, "Board")
        .def(nb::init<std::shared_ptr<Region>>(), nb::arg("memory"))
        .def_prop_ro("entries", &Board::entries)
        .def("open", &Board::open, nb::arg("index"), nb::arg("stamp"), nb::arg("offset"))
        .def("close", &Board::close, nb::arg("index"))
        .def("changes", &Board::changes, nb::arg("index"), nb::arg("stamp"))
        .def("unchanged", &Board::unchanged, nb::arg("index"), nb::arg("changes"))
        .def(
            "copy",
            [](const Board& self, std::uint64_t index, const Board::Stamp& stamp,
               const Window& window, std::uint64_t start, std::uint64_t into,
               std::uint64_t nbytes) {
                const nb::gil_scoped_release without_gil;
                return self.copy(index, stamp, window, start,
                                 reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(into)),
                                 nbytes);
            },
            nb::arg("index"), nb::arg("stamp"), nb::arg("window"), nb::arg("start"),
            nb::arg("into"), nb::arg("nbytes"));
    m.attr("BOARD_ENTRY_BYTES") = Board::kEntryBytes;
}

void bind_mail(nb::module_& m) {
    nb::class_<Mail>(m, "Mail")
        .def(nb::init<std::shared_ptr<Region>, std::uint64_t, std::uint64_t>(), nb::arg("own"),
             nb::arg("ranks"), nb::arg("rank"))
        .def_static("nbytes", &Mail::nbytes, nb::arg("ranks"))
        .def(
            "meet",
            [](Mail& self, std::uint64_t peer, std::shared_ptr<Window> theirs) {
                self.meet(peer, std::move(theirs));
            },
            nb::arg("peer"), nb::arg("theirs"))
        .def(
            "write",
            [](Mail& self, std::uint64_t peer, const nb::object& data) {
                Py_buffer view;
                if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0)
                    throw nb::python_error();
                const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&view,
                                                                            PyBuffer_Release);
                return self.write(peer, static_cast<const char*>(view.buf),
                                  static_cast<std::uint64_t>(view.len));
            },
            nb::arg("peer"), nb::arg("data"))
        .def(
            "read",
            [](Mail& self, std::uint64_t peer) {
                const std::uint64_t nbytes = self.unread(peer);
                const nb::bytes found = nb::steal<nb::bytes>(
                    PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
                if (!found.is_valid()) throw nb::python_error();
                if (nbytes != 0) self.read(peer, PyBytes_AS_STRING(found.ptr()), nbytes);
                return found;
            },
            nb::arg("peer"))
        .def("unread", nb::overload_cast<>(&Mail::unread, nb::const_))
        .def("sleep", &Mail::sleep, nb::arg("who"), nb::arg("how"))
        .def("sleeper", &Mail::sleeper, nb::arg("peer"), nb::arg("who"));
}

void bind_lease(nb::module_& m) {
    nb::class_<LeaseHandle>(m, "Lease")
        .def_prop_ro("address",
                     [](const LeaseHandle& self) {
                         return reinterpret_cast<std::uintptr_t>(self.get()->address());
                     })
        .def_prop_ro("offset", [](const LeaseHandle& self) { return self.get()->offset(); })
        .def_prop_ro("nbytes", [](const LeaseHandle& self) { return self.get()->nbytes(); })
        .def_prop_ro("last_return",
                     [](const LeaseHandle& self) { return self.get()->last_return(); })
        .def("release", &LeaseHandle::release)
        .def("to_dlpack", [](const LeaseHandle& self) { return to_dlpack(self.get()); });

    nb::enum_<Refusal::Reason>(m, "Reason")
        .value("CLOSED", Refusal::Reason::closed)
        .value("QUEUED", Refusal::Reason::queued)
        .value("FULL", Refusal::Reason::full);
    nb::class_<Refusal>(m, "Refusal")
        .def_ro("reason", &Refusal::reason)
        .def_ro("needed", &Refusal::needed);
}

void bind_pool(nb::module_& m) {
    nb::class_<Pool>(m, "Pool")
        .def(nb::new_([](std::shared_ptr<Region> region, std::uint64_t offset, std::uint64_t nbytes,
                         std::uint64_t granule) {
                 return std::make_shared<Pool>(std::move(region), offset, nbytes, granule);
             }),
             nb::arg("region"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("granule"))
        .def("lease", &lease, nb::arg("nbytes"), nb::arg("timeout"))
        .def("close", &Pool::close)
        .def_prop_ro("forked", &Pool::forked)
        .def_prop_ro("capacity", &Pool::capacity)
        .def_prop_ro("largest_free", &Pool::largest_free)
        .def_prop_ro("leased", [](const Pool& pool) { return pool.counters().leased; })
        .def_prop_ro("returns", [](const Pool& pool) { return pool.counters().returns; })
        .def("counters", &counters);
}

void bind_spans(nb::module_& m) {
    nb::class_<SpanAllocator>(m, "SpanAllocator")
        .def(nb::init<std::uint64_t, std::uint64_t>(), nb::arg("capacity"), nb::arg("granule"))
        .def(
            "take",
            [](SpanAllocator& self, std::uint64_t nbytes) -> std::optional<std::uint64_t> {
                const auto span = self.take(nbytes);
                if (!span) return std::nullopt;
                return span->offset;
            },
            nb::arg("nbytes"))
        .def(
            "give_back",
            [](SpanAllocator& self, std::uint64_t offset, std::uint64_t nbytes) {
                self.give_back({offset, nbytes});
            },
            nb::arg("offset"), nb::arg("nbytes"))
        .def_prop_ro("capacity", &SpanAllocator::capacity)
        .def_prop_ro("used", &SpanAllocator::used)
        .def_prop_ro("largest_free", &SpanAllocator::largest_free)
        .def("capacity_for", &SpanAllocator::capacity_for, nb::arg("nbytes"));
}

}  // namespace

NB_MODULE(_tiers, m) {
    // Leases may outlive the teardown of the interpreter by design, so leaks are not reported.
    nb::set_leak_warnings(false);
    nb::register_exception_translator([](const std::exception_ptr& pending, void*) {
        try {
            std::rethrow_exception(pending);
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        } catch (const Forked& error) {
            // The Python face turns this into a typed error with its cure: this module stands below
            // infinity.errors.
            PyErr_SetString(PyExc_ChildProcessError, error.what());
        }
    });
    m.def("_leave", [] { infinity::see_waits_out(std::chrono::seconds(2)); });
    bind_region(m);
    bind_board(m);
    bind_mail(m);
    bind_lease(m);
    bind_pool(m);
    bind_spans(m);
}
