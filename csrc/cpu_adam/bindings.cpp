// The Python face of the core, kept thin: the package infinity/cpu_adam checks tensors and holds
// the documentation. Addresses are passed as integers, so that no torch ABI is needed.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.hpp"
#include "errors.hpp"
#include "exact_sum.hpp"
#include "isa.hpp"
#include "jobs.hpp"
#include "python_typed_errors.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinity::cpu_adam {
namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Waits in slices, so that Ctrl-C can interrupt a wait for a long update.
bool wait_seeing_signals(const Ticket& ticket, std::optional<double> timeout) {
    using Clock = std::chrono::steady_clock;
    constexpr double kSlice = 0.05;
    const Clock::time_point start = Clock::now();
    for (;;) {
        double slice = kSlice;
        if (timeout) {
            const std::chrono::duration<double> waited = Clock::now() - start;
            slice = std::clamp(*timeout - waited.count(), 0.0, kSlice);
        }
        bool done = false;
        {
            nb::gil_scoped_release release;
            done = ticket.wait(slice);
        }
        if (done) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (timeout && slice < kSlice) return false;
    }
}

template <class J>
struct JobTicket {
    Ticket ticket;
    std::shared_ptr<J> job;
};

// A pool together with the Python objects whose memory its jobs use. The pool's threads do not know
// these objects. The first call that finds a job done drops its objects, under the GIL.
class OwningPool {
  public:
    OwningPool(const std::vector<int>& cpus, const std::string& isa, size_t chunk, bool openmp)
        : kernels_(select_kernels(isa)),
          chunk_(chunk),
          pool_(cpus, openmp ? Team::loaded() : Team{}),
          cpus_(cpus) {}
    OwningPool(const OwningPool&) = delete;
    OwningPool& operator=(const OwningPool&) = delete;
    ~OwningPool() { close(); }

    // hooks: of each job; empty: none. Jobs begin in their order.
    template <class J>
    std::vector<JobTicket<J>> submit(const std::vector<std::shared_ptr<J>>& jobs, nb::object owners,
                                     bool awaited, int64_t priority,
                                     const std::vector<std::shared_ptr<JobHooks>>& hooks = {}) {
        reap();
        std::vector<JobTicket<J>> tickets;
        {
            const nb::gil_scoped_release release;
            for (size_t i = 0; i < jobs.size(); ++i) {
                Submission how{awaited, priority, hooks.empty() ? nullptr : hooks.at(i)};
                tickets.push_back({pool_.submit(jobs[i], std::move(how)), jobs[i]});
            }
        }
        held_.emplace_back(std::vector<std::shared_ptr<Job>>(jobs.begin(), jobs.end()),
                           std::move(owners));
        return tickets;
    }

    void close() {
        {
            nb::gil_scoped_release release;
            pool_.close();
        }
        reap();
    }

    void reap() {
        // Dropping an object can run any Python code, even this method, so the objects are taken
        // out first. Each job is asked once, because it may end meanwhile.
        std::vector<Held> done;
        const auto unfinished = [](const Held& each) {
            return !std::all_of(each.first.begin(), each.first.end(),
                                [](const auto& job) { return job->done(); });
        };
        const auto first = std::stable_partition(held_.begin(), held_.end(), unfinished);
        std::move(first, held_.end(), std::back_inserter(done));
        held_.erase(first, held_.end());
    }

    const KernelTable& kernels() const { return kernels_; }
    size_t chunk() const { return chunk_; }
    const std::vector<int>& cpus() const { return cpus_; }

  private:
    // Jobs that were submitted together, and the objects whose memory they use.
    using Held = std::pair<std::vector<std::shared_ptr<Job>>, nb::object>;

    const KernelTable& kernels_;
    const size_t chunk_;
    ThreadPool pool_;
    const std::vector<int> cpus_;
    std::vector<Held> held_;
};

// hooks: None, or an object of another module that has a capsule of JobHooks.
std::vector<std::shared_ptr<JobHooks>> hooks_of(const nb::object& hooks) {
    if (hooks.is_none()) return {};
    const nb::capsule given = nb::cast<nb::capsule>(hooks.attr("capsule"));
    return *static_cast<std::vector<std::shared_ptr<JobHooks>>*>(given.data(kJobHooks));
}

// start, count, hyper, index, seed
using SegmentTuple = std::tuple<size_t, size_t, size_t, size_t, uint32_t>;

std::vector<Segment> segments_of(const std::vector<SegmentTuple>& tuples) {
    std::vector<Segment> segments;
    segments.reserve(tuples.size());
    for (const auto& [start, count, hyper, index, seed] : tuples) {
        segments.push_back({start, count, hyper, index, seed});
    }
    return segments;
}

// (number of the range, offset in bytes), and (start, count, index, parameter)
using PlaceTuple = std::pair<size_t, size_t>;
using PartTuple = std::tuple<size_t, size_t, size_t, size_t>;

void make_form(UpdateForm* self, size_t elements, Dtype grad_dtype, ParameterFormat format,
               MomentFormat moments, const std::vector<std::optional<PlaceTuple>>& places,
               const std::vector<PartTuple>& parts) {
    UpdateForm form{elements, grad_dtype, format, moments, {}, {}};
    for (size_t i = 0; i < form.places.size(); ++i) {
        if (const auto& place = places.at(i)) form.places[i] = {place->first, place->second};
    }
    for (const auto& part : parts) {
        form.parts.push_back(std::make_from_tuple<UpdateForm::Part>(part));
    }
    new (self) UpdateForm(std::move(form));
}

// Updates that were submitted together.
struct UpdateTickets {
    std::vector<JobTicket<UpdateJob>> each;

    bool done() const {
        return std::all_of(each.begin(), each.end(),
                           [](const auto& one) { return one.ticket.done(); });
    }
    void wait() const {
        for (const auto& one : each) {
            if (!one.ticket.done()) wait_seeing_signals(one.ticket, std::nullopt);
        }
    }
};

// (parameter, hyper, seed)
using ChosenTuple = std::tuple<size_t, size_t, uint32_t>;
using Addresses = std::vector<uintptr_t>;

UpdateTickets submit_updates(OwningPool& pool, nb::object owners,
                             const std::vector<const UpdateForm*>& forms,
                             const std::vector<Addresses>& memory,
                             const std::optional<std::vector<Addresses>>& outputs,
                             const std::vector<ChosenTuple>& chosen, std::vector<Hyper> hypers,
                             double scale, const AverageStep& average_step, bool awaited,
                             int64_t priority, const nb::object& hooks) {
    UpdateStep step{{}, std::move(hypers), scale, average_step};
    for (const auto& [parameter, hyper, seed] : chosen) {
        if (parameter >= step.parameters.size()) step.parameters.resize(parameter + 1);
        step.parameters[parameter] = {hyper, seed};
    }
    std::vector<std::shared_ptr<UpdateJob>> jobs;
    {
        const nb::gil_scoped_release release;
        for (size_t i = 0; i < forms.size(); ++i) {
            UpdateRequest request =
                request_of(*forms[i], step, memory.at(i), outputs ? &outputs->at(i) : nullptr);
            jobs.push_back(make_update_job(pool.kernels(), std::move(request), pool.chunk()));
        }
    }
    return {pool.submit(jobs, std::move(owners), awaited, priority, hooks_of(hooks))};
}

JobTicket<GradientJob> submit_gradient(OwningPool& pool, nb::object owners, size_t elements,
                                       Dtype grad_dtype, uintptr_t grad, uintptr_t accumulated,
                                       uintptr_t copy, bool read_accumulated,
                                       bool write_accumulated, bool squares,
                                       const std::vector<SegmentTuple>& segments, double scale,
                                       bool awaited) {
    GradientRequest request{
        elements,
        grad_dtype,
        {pointer<const void>(grad), pointer<float>(accumulated), pointer<void>(copy),
         read_accumulated, write_accumulated, squares, static_cast<float>(scale)},
        segments_of(segments)};
    // Others wait for a gradient's room, and nobody for an update that is queued already.
    const std::vector jobs{make_gradient_job(pool.kernels(), std::move(request), pool.chunk())};
    return pool.submit(jobs, std::move(owners), awaited, std::numeric_limits<int64_t>::max())[0];
}

JobTicket<StreamJob> submit_stream(
    OwningPool& pool, nb::object owners, size_t elements, size_t granule,
    const std::vector<std::tuple<uintptr_t, uint32_t, Access>>& arrays, bool awaited) {
    StreamRequest request{elements, {}, granule};
    for (const auto& [address, bytes, access] : arrays) {
        request.arrays.push_back({pointer<unsigned char>(address), bytes, access});
    }
    const std::vector jobs{make_stream_job(pool.kernels(), std::move(request), pool.chunk())};
    return pool.submit(jobs, std::move(owners), awaited, 0)[0];
}

using Float64Array = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

std::vector<Float64Array> block_sums(const JobTicket<GradientJob>& self) {
    std::vector<Float64Array> arrays;
    for (size_t i = 0; i < self.job->segments(); ++i) {
        auto sums = std::make_unique<std::vector<double>>(self.job->block_sums(i));
        double* const data = sums->data();
        const size_t count = sums->size();
        const nb::capsule owner(
            sums.release(), [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
        arrays.emplace_back(data, std::initializer_list<size_t>{count}, owner);
    }
    return arrays;
}

template <class J>
nb::class_<JobTicket<J>> bind_ticket(nb::module_& m, const char* name) {
    return nb::class_<JobTicket<J>>(m, name)
        .def("done", [](const JobTicket<J>& self) { return self.ticket.done(); })
        .def("times",
             [](const JobTicket<J>& self) -> std::optional<std::pair<int64_t, int64_t>> {
                 if (!self.ticket.done()) return std::nullopt;
                 return std::pair(self.job->began_ns(), self.job->ended_ns());
             })
        .def(
            "wait",
            [](const JobTicket<J>& self, std::optional<double> timeout) {
                return wait_seeing_signals(self.ticket, timeout);
            },
            "timeout"_a.none());
}

using Float64View = nb::ndarray<const double, nb::ndim<1>, nb::device::cpu>;

// The exact sum of all elements: bytes of an integer, the lowest first, and the sum of what is not
// finite.
std::pair<nb::bytes, double> add_exactly(const std::vector<Float64View>& arrays) {
    ExactSum sum;
    {
        nb::gil_scoped_release release;
        for (const Float64View& each : arrays) sum.add(each.data(), each.shape(0), each.stride(0));
    }
    const auto units = sum.units();
    static_assert(std::endian::native == std::endian::little);
    return {nb::bytes(units.data(), sizeof(units)), sum.nonfinite()};
}

void translate(const std::exception_ptr& caught, void*) {
    try {
        std::rethrow_exception(caught);
    } catch (const ConfigError& error) {
        infinity::set_error(infinity::errors_of("ConfigError")(error.cause, error.cure));
    }
}

// The layout that infinity/device_update/table.py packs.
static_assert(sizeof(UpdateLaunch) == 4072 && offsetof(UpdateLaunch, gradients) == 24 &&
              offsetof(UpdateLaunch, hypers) == 2084 && offsetof(UpdateLaunch, seeds) == 2788 &&
              offsetof(UpdateLaunch, hyper) == 3812);
static_assert(sizeof(DevicePiece) == 96 && offsetof(DevicePiece, start) == 72 &&
              offsetof(DevicePiece, gradient) == 88 && offsetof(DevicePiece, index_high) == 92);
static_assert(sizeof(PiecesLaunch) == 3656 && offsetof(PiecesLaunch, hypers) == 2808 &&
              offsetof(PiecesLaunch, seeds) == 3512 && offsetof(PiecesLaunch, hyper) == 3624);
static_assert(sizeof(SquaresLaunch) == 32);
static_assert(sizeof(FreshSquaresLaunch) == 40 && offsetof(FreshSquaresLaunch, dtype) == 36);

void bind_formats(nb::module_& m) {
    nb::enum_<Dtype>(m, "Dtype")
        .value("F32", Dtype::kF32)
        .value("BF16", Dtype::kBf16)
        .value("F16", Dtype::kF16);
    nb::enum_<ParameterFormat>(m, "ParameterFormat")
        .value("PLAIN", ParameterFormat::kPlain)
        .value("PLAIN_F32", ParameterFormat::kPlainF32)
        .value("PLAIN_BF16", ParameterFormat::kPlainBf16)
        .value("PLAIN_F16", ParameterFormat::kPlainF16)
        .value("SPLIT", ParameterFormat::kSplit);
    nb::enum_<MomentFormat>(m, "MomentFormat")
        .value("F32", MomentFormat::kF32)
        .value("BF16", MomentFormat::kBf16)
        .value("INT8", MomentFormat::kInt8);
    nb::enum_<Rule>(m, "Rule")
        .value("ADAM_W", Rule::kAdamW)
        .value("ADAM_W_SMALL_BETA", Rule::kAdamWSmallBeta)
        .value("ADAM", Rule::kAdam)
        .value("ADAM_SMALL_BETA", Rule::kAdamSmallBeta)
        .value("SGD", Rule::kSgd)
        .value("SGD_MOMENTUM", Rule::kSgdMomentum)
        .value("ADAGRAD", Rule::kAdagrad)
        .value("LION", Rule::kLion);
    nb::enum_<Access>(m, "Access")
        .value("READ", Access::kRead)
        .value("WRITE", Access::kWrite)
        .value("READ_WRITE", Access::kReadWrite);
}

void bind_hypers(nb::module_& m) {
    nb::class_<AverageStep>(m, "AverageStep")
        .def(
            "__init__",
            [](AverageStep* self, bool begins, double weight) {
                new (self) AverageStep{begins, static_cast<float>(weight)};
            },
            "begins"_a, "weight"_a);
    nb::class_<AdamHyper>(m, "AdamHyper")
        .def(nb::init<bool, double, double, double, double, double, int64_t, bool>(), "decoupled"_a,
             "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "maximize"_a);
    nb::class_<SgdHyper>(m, "SgdHyper")
        .def(nb::init<double, double, double, double, bool, bool, bool>(), "lr"_a, "momentum"_a,
             "dampening"_a, "weight_decay"_a, "nesterov"_a, "first_step"_a, "maximize"_a);
    nb::class_<AdagradHyper>(m, "AdagradHyper")
        .def(nb::init<double, double, double, double, int64_t, bool>(), "lr"_a, "lr_decay"_a,
             "eps"_a, "weight_decay"_a, "step"_a, "maximize"_a);
    nb::class_<LionHyper>(m, "LionHyper")
        .def(nb::init<double, double, double, double, bool>(), "lr"_a, "beta1"_a, "beta2"_a,
             "weight_decay"_a, "maximize"_a);
}

void bind_updates(nb::module_& m) {
    bind_ticket<UpdateJob>(m, "UpdateTicket")
        .def_prop_ro("elements",
                     [](const JobTicket<UpdateJob>& self) { return self.job->updated(); })
        .def("nonfinite", [](const JobTicket<UpdateJob>& self) { return self.job->nonfinite(); });
    nb::class_<UpdateTickets>(m, "UpdateTickets")
        .def("done", &UpdateTickets::done)
        .def("wait", &UpdateTickets::wait)
        .def_ro("each", &UpdateTickets::each);
    nb::class_<UpdateForm>(m, "UpdateForm")
        .def("__init__", make_form, "elements"_a, "grad_dtype"_a, "format"_a, "moments"_a,
             "places"_a, "parts"_a);
}

void bind_pool(nb::module_& m) {
    nb::class_<OwningPool>(m, "Pool")
        .def(nb::init<const std::vector<int>&, const std::string&, size_t, bool>(), "cpus"_a,
             "isa"_a, "chunk"_a, "openmp"_a)
        .def("close", &OwningPool::close)
        .def_prop_ro("cpus", &OwningPool::cpus)
        .def_prop_ro("isa", [](const OwningPool& self) { return self.kernels().name; })
        .def("reap", &OwningPool::reap)
        .def("submit_updates", submit_updates, "owners"_a, "forms"_a, "memory"_a,
             "outputs"_a.none(), "chosen"_a, "hypers"_a, "scale"_a, "average_step"_a, "awaited"_a,
             "priority"_a, "hooks"_a.none())
        .def("submit_gradient", submit_gradient, "owners"_a, "elements"_a, "grad_dtype"_a, "grad"_a,
             "accumulated"_a, "copy"_a, "read_accumulated"_a, "write_accumulated"_a, "squares"_a,
             "segments"_a, "scale"_a, "awaited"_a)
        .def("submit_stream", submit_stream, "owners"_a, "elements"_a, "granule"_a, "arrays"_a,
             "awaited"_a);
}

}  // namespace
}  // namespace infinity::cpu_adam

NB_MODULE(_cpu_adam, m) {
    using namespace infinity::cpu_adam;
    // An instance may live until the interpreter ends, so leaks are not reported.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate);
    bind_formats(m);
    bind_hypers(m);
    bind_updates(m);
    bind_ticket<GradientJob>(m, "GradientTicket").def("block_sums", block_sums);
    bind_ticket<StreamJob>(m, "StreamTicket");
    bind_pool(m);
    m.def("runnable_isas", [] {
        std::vector<std::string> names;
        for (const KernelTable* table : runnable_kernels()) names.emplace_back(table->name);
        return names;
    });
    // The bytes of a Folded, for launches on a device. The first byte is the rule.
    m.def(
        "fold",
        [](const Hyper& hyper, double scale) {
            const Folded folded = fold(hyper, scale);
            return nb::bytes(&folded, sizeof(folded));
        },
        "hyper"_a, "scale"_a);
    m.def("add_exactly", add_exactly, "arrays"_a);
    m.attr("PIECE_BYTES") = sizeof(DevicePiece);
    m.attr("FOLDED_BYTES") = sizeof(Folded);
    m.attr("TILE") = kTile;
    m.attr("MOST_HYPERS") = kMostHypers;
    m.attr("MOST_PARAMETERS") = kMostParameters;
    m.attr("MOST_PIECES") = kMostPieces;
    m.attr("NO_UPDATE") = kNoUpdate;
    m.attr("AVERAGED") = kAveraged;
    m.attr("BLOCK") = kBlock;
    m.attr("CODE_BLOCK") = kCodeBlock;
    m.attr("FIRST_SPAN") = kFirstSpan;
    m.attr("SECOND_SPAN") = kSecondSpan;
    m.attr("CODE_BIT") = kCodeBit;
    m.attr("NOT_FINITE") = kNotFinite;
    m.attr("ROUNDS_UP") = kRoundsUp;
    m.attr("DEFAULT_CHUNK") = kDefaultChunk;
}
