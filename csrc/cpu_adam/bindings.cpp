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

    template <class J>
    JobTicket<J> submit(std::shared_ptr<J> job, nb::object owners, Submission how) {
        reap();
        JobTicket<J> handle{pool_.submit(job, std::move(how)), job};
        held_.emplace_back(std::move(job), std::move(owners));
        return handle;
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
        // out first.
        std::vector<std::pair<std::shared_ptr<Job>, nb::object>> done;
        const auto finished = [](const auto& each) { return each.first->done(); };
        std::copy_if(held_.begin(), held_.end(), std::back_inserter(done), finished);
        held_.erase(std::remove_if(held_.begin(), held_.end(), finished), held_.end());
    }

    const KernelTable& kernels() const { return kernels_; }
    size_t chunk() const { return chunk_; }
    const std::vector<int>& cpus() const { return cpus_; }

  private:
    const KernelTable& kernels_;
    const size_t chunk_;
    ThreadPool pool_;
    const std::vector<int> cpus_;
    std::vector<std::pair<std::shared_ptr<Job>, nb::object>> held_;
};

// hooks: None, or an object of another module that has a capsule of JobHooks.
Submission submission(bool awaited, int64_t priority, const nb::object& hooks) {
    Submission how{awaited, priority};
    if (!hooks.is_none()) {
        const nb::capsule given = nb::cast<nb::capsule>(hooks.attr("capsule"));
        how.hooks = *static_cast<std::shared_ptr<JobHooks>*>(given.data(kJobHooks));
    }
    return how;
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

// parameter, remainder, copy, first moment, second moment, first scale, second scale
using OutputTuple =
    std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;

std::optional<UpdateArrays> outputs_of(const std::optional<OutputTuple>& tuple) {
    if (!tuple) return std::nullopt;
    const auto& [parameter, remainder, copy, first, second, first_scale, second_scale] = *tuple;
    UpdateArrays arrays;
    arrays.param = pointer<void>(parameter);
    arrays.remainder = pointer<int16_t>(remainder);
    arrays.copy = pointer<void>(copy);
    arrays.first_moment = pointer<void>(first);
    arrays.second_moment = pointer<void>(second);
    arrays.first_scale = pointer<uint8_t>(first_scale);
    arrays.second_scale = pointer<uint8_t>(second_scale);
    return arrays;
}

JobTicket<UpdateJob> submit_update(
    OwningPool& pool, nb::object owners, size_t elements, Dtype grad_dtype, ParameterFormat format,
    MomentFormat moments, uintptr_t grad, uintptr_t accumulated, uintptr_t parameter,
    uintptr_t remainder, uintptr_t copy, uintptr_t first_moment, uintptr_t second_moment,
    uintptr_t first_scale, uintptr_t second_scale, uintptr_t average,
    const AverageStep& average_step, const std::vector<SegmentTuple>& segments,
    const std::vector<Hyper>& hypers, double scale, const std::optional<OutputTuple>& outputs,
    bool awaited, int64_t priority, const nb::object& hooks) {
    const UpdateArrays arrays{pointer<const void>(grad),     pointer<const float>(accumulated),
                              pointer<void>(parameter),      pointer<int16_t>(remainder),
                              pointer<void>(copy),           pointer<void>(first_moment),
                              pointer<void>(second_moment),  pointer<uint8_t>(first_scale),
                              pointer<uint8_t>(second_scale)};
    UpdateRequest request{elements,
                          grad_dtype,
                          format,
                          moments,
                          arrays,
                          segments_of(segments),
                          hypers,
                          scale,
                          pointer<float>(average),
                          average_step,
                          outputs_of(outputs)};
    return pool.submit(make_update_job(pool.kernels(), std::move(request), pool.chunk()),
                       std::move(owners), submission(awaited, priority, hooks));
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
    return pool.submit(make_gradient_job(pool.kernels(), std::move(request), pool.chunk()),
                       std::move(owners), {awaited, std::numeric_limits<int64_t>::max()});
}

JobTicket<StreamJob> submit_stream(
    OwningPool& pool, nb::object owners, size_t elements, size_t granule,
    const std::vector<std::tuple<uintptr_t, uint32_t, Access>>& arrays, bool awaited) {
    StreamRequest request{elements, {}, granule};
    for (const auto& [address, bytes, access] : arrays) {
        request.arrays.push_back({pointer<unsigned char>(address), bytes, access});
    }
    return pool.submit(make_stream_job(pool.kernels(), std::move(request), pool.chunk()),
                       std::move(owners), {awaited});
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

void bind_pool(nb::module_& m) {
    nb::class_<OwningPool>(m, "Pool")
        .def(nb::init<const std::vector<int>&, const std::string&, size_t, bool>(), "cpus"_a,
             "isa"_a, "chunk"_a, "openmp"_a)
        .def("close", &OwningPool::close)
        .def_prop_ro("cpus", &OwningPool::cpus)
        .def_prop_ro("isa", [](const OwningPool& self) { return self.kernels().name; })
        .def("reap", &OwningPool::reap)
        .def("submit_update", submit_update, "owners"_a, "elements"_a, "grad_dtype"_a, "format"_a,
             "moments"_a, "grad"_a, "accumulated"_a, "parameter"_a, "remainder"_a, "copy"_a,
             "first_moment"_a, "second_moment"_a, "first_scale"_a, "second_scale"_a, "average"_a,
             "average_step"_a, "segments"_a, "hypers"_a, "scale"_a, "outputs"_a.none(), "awaited"_a,
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
    bind_ticket<UpdateJob>(m, "UpdateTicket").def("nonfinite", [](const JobTicket<UpdateJob>& t) {
        return t.job->nonfinite();
    });
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
