#include "jobs.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "errors.hpp"

namespace infinity::cpu_adam {
namespace {

constexpr size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

size_t copy_bytes(ParameterFormat format) {
    switch (format) {
        case ParameterFormat::kPlainF32:
            return 4;
        case ParameterFormat::kPlainBf16:
        case ParameterFormat::kPlainF16:
            return 2;
        default:
            return 0;
    }
}

size_t moment_bytes(MomentFormat format) {
    switch (format) {
        case MomentFormat::kF32:
            return 4;
        case MomentFormat::kBf16:
            return 2;
        default:
            return 1;
    }
}

// One array of a request, as the checks see it. It has one entry for every `elements_per_entry`
// elements.
struct Array {
    const char* name;
    const void* data;
    size_t bytes_per_entry;
    bool written;
    size_t elements_per_entry = 1;

    // The number of bytes up to the entry of the last of `elements` elements.
    size_t bytes(size_t elements) const {
        const size_t whole = elements / elements_per_entry;
        return (whole + (elements % elements_per_entry != 0 ? 1 : 0)) * bytes_per_entry;
    }
};

void check_arrays(const std::vector<Array>& arrays, size_t elements) {
    for (const Array& a : arrays) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(a.data);
        if (a.data == nullptr && elements > 0) {
            throw ConfigError("The array '" + std::string(a.name) + "' is missing.",
                              "Give it: this rule and format need it.");
        }
        if (elements > (UINTPTR_MAX - at) / std::max<size_t>(a.bytes_per_entry, 1)) {
            throw ConfigError("The array '" + std::string(a.name) + "' of " +
                                  std::to_string(elements) +
                                  " elements ends beyond the address "
                                  "space.",
                              "Give the number of elements, not of bytes.");
        }
        if (a.bytes_per_entry == 4 || a.bytes_per_entry == 2) {
            if (at % a.bytes_per_entry != 0) {
                throw ConfigError(
                    "The array '" + std::string(a.name) + "' is not aligned to its elements.",
                    "Start it at a multiple of its element size in bytes.");
            }
        }
    }
    for (size_t i = 0; i < arrays.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
            const Array& a = arrays[i];
            const Array& b = arrays[j];
            const uintptr_t at_a = reinterpret_cast<uintptr_t>(a.data);
            const uintptr_t at_b = reinterpret_cast<uintptr_t>(b.data);
            if ((a.written || b.written) && at_a < at_b + b.bytes(elements) &&
                at_b < at_a + a.bytes(elements)) {
                throw ConfigError(
                    "The arrays '" + std::string(b.name) + "' and '" + a.name + "' overlap.",
                    "Give each kind of state memory of its own.");
            }
        }
    }
}

void check_segments(const std::vector<Segment>& segments, size_t elements) {
    std::vector<std::pair<size_t, size_t>> order;
    for (size_t i = 0; i < segments.size(); ++i) {
        const Segment& s = segments[i];
        if (s.count > elements || s.start > elements - s.count) {
            throw ConfigError("Segment " + std::to_string(i) + " (start " +
                                  std::to_string(s.start) + ", count " + std::to_string(s.count) +
                                  ") ends outside the arrays of " + std::to_string(elements) +
                                  " elements.",
                              "Give starts and counts in elements, within the arrays.");
        }
        if (s.count > 0) order.emplace_back(s.start, i);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 1; i < order.size(); ++i) {
        const Segment& before = segments[order[i - 1].second];
        if (before.start + before.count > order[i].first) {
            throw ConfigError("Segments " + std::to_string(order[i - 1].second) + " and " +
                                  std::to_string(order[i].second) + " overlap.",
                              "Give every element to one segment at most.");
        }
    }
}

// Checks that every segment starts at a multiple of kCodeBlock, in the arrays and in its parameter.
// Then blocks count from the parameter's first element, and each block has a slot of its own.
void check_blocks(const std::vector<Segment>& segments) {
    for (size_t i = 0; i < segments.size(); ++i) {
        const Segment& s = segments[i];
        if (s.count == 0 || (s.start % kCodeBlock == 0 && s.index % kCodeBlock == 0)) continue;
        throw ConfigError(
            "Segment " + std::to_string(i) + " (start " + std::to_string(s.start) + ", index " +
                std::to_string(s.index) + ") does not start where a block of int8 moments can.",
            "Give a start and an index that are multiples of " + std::to_string(kCodeBlock) + ".");
    }
}

void check_chunk(size_t chunk) {
    if (chunk == 0 || chunk % kBlock != 0) {
        throw ConfigError("A chunk of " + std::to_string(chunk) + " elements was asked for.",
                          "Give a positive multiple of " + std::to_string(kBlock) + ".");
    }
}

Chunks cut(const std::vector<Segment>& segments, size_t chunk) {
    Chunks plan;
    size_t room = chunk;
    for (size_t index = 0; index < segments.size(); ++index) {
        const Segment& s = segments[index];
        for (size_t done = 0; done < s.count;) {
            // Take whole blocks, unless the rest of the segment fits.
            size_t take = std::min(s.count - done, room);
            if (take < s.count - done) take -= take % kBlock;
            if (take == 0) {
                plan.first.push_back(plan.pieces.size());
                room = chunk;
                continue;
            }
            plan.pieces.push_back({index, s.start + done, take});
            done += take;
            room -= take;
        }
    }
    if (plan.first.back() != plan.pieces.size()) plan.first.push_back(plan.pieces.size());
    return plan;
}

// The bytes from the first to the last element that any segment contains, for each array.
std::vector<ByteRange> touched(const std::vector<Array>& arrays,
                               const std::vector<Segment>& segments) {
    size_t begin = SIZE_MAX;
    size_t end = 0;
    for (const Segment& s : segments) {
        if (s.count == 0) continue;
        begin = std::min(begin, s.start);
        end = std::max(end, s.start + s.count);
    }
    std::vector<ByteRange> ranges;
    for (const Array& a : arrays) {
        if (begin >= end) break;
        const uintptr_t at = reinterpret_cast<uintptr_t>(a.data);
        ranges.push_back(
            {at + begin / a.elements_per_entry * a.bytes_per_entry, at + a.bytes(end), a.written});
    }
    return ranges;
}

std::vector<Array> arrays_of(const UpdateRequest& r, bool updates, bool first_moment,
                             bool second_moment) {
    const bool split = r.format == ParameterFormat::kSplit;
    std::vector<Array> arrays;
    const UpdateArrays& outputs = r.outputs ? *r.outputs : r.arrays;
    const auto changed = [&](const char* name, const void* before, const void* after, size_t bytes,
                             size_t elements_per_entry = 1) {
        if (before != after) {
            arrays.push_back({name, before, bytes, false, elements_per_entry});
        }
        arrays.push_back({name, after, bytes, true, elements_per_entry});
    };
    if (updates) arrays.push_back({"grad", r.arrays.grad, dtype_bytes(r.grad_dtype), false});
    changed("parameter", r.arrays.param, outputs.param, split ? 2U : 4U);
    if (r.averages != nullptr) arrays.push_back({"average", r.averages, 4, true});
    if (r.arrays.acc != nullptr) arrays.push_back({"accumulated", r.arrays.acc, 4, false});
    if (split) changed("remainder", r.arrays.remainder, outputs.remainder, 2);
    if (const size_t bytes = copy_bytes(r.format); bytes != 0) {
        arrays.push_back({"copy", outputs.copy, bytes, true});
    }
    const size_t bytes = moment_bytes(r.moments);
    const bool scales = r.moments == MomentFormat::kInt8;
    if (first_moment) {
        changed("first_moment", r.arrays.first_moment, outputs.first_moment, bytes);
        if (scales) {
            changed("first_scale", r.arrays.first_scale, outputs.first_scale, 1, kCodeBlock);
        }
    }
    if (second_moment) {
        changed("second_moment", r.arrays.second_moment, outputs.second_moment, bytes);
        if (scales) {
            changed("second_scale", r.arrays.second_scale, outputs.second_scale, 1, kCodeBlock);
        }
    }
    return arrays;
}

// The arrays of a form in ranges of memory.
UpdateArrays arrays_in(const UpdateForm& form, const std::vector<uintptr_t>& memory,
                       float** averages) {
    std::array<void*, UpdateForm::kArrays> at{};
    for (size_t i = 0; i < at.size(); ++i) {
        if (const auto& place = form.places[i]) {
            at[i] = reinterpret_cast<void*>(memory.at(place->memory) + place->offset);
        }
    }
    *averages = static_cast<float*>(at[9]);
    return {at[0],
            static_cast<const float*>(at[1]),
            at[2],
            static_cast<int16_t*>(at[3]),
            at[4],
            at[5],
            at[6],
            static_cast<uint8_t*>(at[7]),
            static_cast<uint8_t*>(at[8])};
}

}  // namespace

UpdateRequest request_of(const UpdateForm& form, const UpdateStep& step,
                         const std::vector<uintptr_t>& memory,
                         const std::vector<uintptr_t>* outputs) {
    UpdateRequest request{form.elements, form.grad_dtype, form.format, form.moments, {}, {},
                          step.hypers,   step.scale,      nullptr,     step.average, {}};
    request.arrays = arrays_in(form, memory, &request.averages);
    if (outputs != nullptr) {
        float* unused = nullptr;
        request.outputs = arrays_in(form, *outputs, &unused);
    }
    for (const UpdateForm::Part& part : form.parts) {
        if (part.parameter >= step.parameters.size()) continue;
        if (const auto& chosen = step.parameters[part.parameter]) {
            request.segments.push_back(
                {part.start, part.count, chosen->hyper, part.index, chosen->seed});
        }
    }
    return request;
}

UpdateJob::UpdateJob(const KernelTable& kernels, const UpdateRequest& request, Chunks chunks,
                     std::vector<Folded> folded, std::vector<ByteRange> touches)
    : Job(chunks.first.size() - 1, std::move(touches)),
      kernels_(kernels),
      request_(request),
      plan_(std::move(chunks)),
      folded_(std::move(folded)),
      nonfinite_(request.segments.size()) {}

void UpdateJob::run(size_t chunk) noexcept {
    const UpdateArrays& outputs = request_.outputs ? *request_.outputs : request_.arrays;
    for (size_t i = plan_.first[chunk]; i < plan_.first[chunk + 1]; ++i) {
        const Piece& piece = plan_.pieces[i];
        const Segment& segment = request_.segments[piece.segment];
        const size_t index = segment.index + (piece.begin - segment.start);
        const Range range{piece.begin, piece.count, static_cast<uint32_t>(index), segment.seed};
        const auto format = static_cast<int>(request_.format);
        if (segment.hyper != kAveraged) {
            const Folded& folded = folded_[segment.hyper];
            const auto rule = static_cast<int>(folded.rule);
            const UpdateKernel kernel = kernels_.update[rule][static_cast<int>(request_.grad_dtype)]
                                                       [format][static_cast<int>(request_.moments)];
            if (kernel(request_.arrays, outputs, folded, range)) {
                nonfinite_[piece.segment].store(true, std::memory_order_relaxed);
            }
        }
        // The piece is small enough to be in a cache still.
        if (request_.averages != nullptr) {
            kernels_.average[format](outputs, request_.averages, request_.average, range);
        }
    }
}

size_t UpdateJob::updated() const {
    size_t elements = 0;
    for (const Segment& each : request_.segments) elements += each.count;
    return elements;
}

std::vector<size_t> UpdateJob::nonfinite() const {
    std::vector<size_t> segments;
    for (size_t i = 0; i < nonfinite_.size(); ++i) {
        if (nonfinite_[i].load(std::memory_order_relaxed)) segments.push_back(i);
    }
    return segments;
}

GradientJob::GradientJob(const KernelTable& kernels, const GradientRequest& request, Chunks chunks,
                         std::vector<ByteRange> touches)
    : Job(chunks.first.size() - 1, std::move(touches)),
      kernels_(kernels),
      request_(request),
      plan_(std::move(chunks)) {
    size_t blocks = 0;
    for (const Segment& s : request_.segments) {
        first_block_.push_back(blocks);
        if (request_.arrays.squares) blocks += (s.count + kBlock - 1) / kBlock;
    }
    first_block_.push_back(blocks);
    sums_.resize(blocks);
}

void GradientJob::run(size_t chunk) noexcept {
    const GradientKernel kernel = kernels_.gradient[static_cast<int>(request_.grad_dtype)];
    for (size_t i = plan_.first[chunk]; i < plan_.first[chunk + 1]; ++i) {
        const Piece& piece = plan_.pieces[i];
        const size_t block = (piece.begin - request_.segments[piece.segment].start) / kBlock;
        double* const sums =
            request_.arrays.squares ? sums_.data() + first_block_[piece.segment] + block : nullptr;
        kernel(request_.arrays, piece.begin, piece.count, sums);
    }
}

std::vector<double> GradientJob::block_sums(size_t segment) const {
    return {sums_.begin() + static_cast<std::ptrdiff_t>(first_block_[segment]),
            sums_.begin() + static_cast<std::ptrdiff_t>(first_block_[segment + 1])};
}

StreamJob::StreamJob(const KernelTable& kernels, StreamRequest request, size_t chunk,
                     std::vector<ByteRange> touches)
    : Job((request.elements + chunk - 1) / chunk, std::move(touches)),
      kernels_(kernels),
      request_(std::move(request)),
      chunk_(chunk) {}

void StreamJob::run(size_t chunk) noexcept {
    const size_t begin = chunk * chunk_;
    const size_t count = std::min(chunk_, request_.elements - begin);
    const uint64_t digest =
        kernels_.stream(request_.arrays.data(), static_cast<int>(request_.arrays.size()),
                        request_.granule, begin, count);
    digest_.fetch_xor(digest, std::memory_order_relaxed);
}

std::shared_ptr<UpdateJob> make_update_job(const KernelTable& kernels, UpdateRequest request,
                                           size_t chunk) {
    check_chunk(chunk);
    std::vector<Folded> folded;
    for (const Hyper& hyper : request.hypers) folded.push_back(fold(hyper, request.scale));
    check_segments(request.segments, request.elements);
    bool updates = request.segments.empty();
    bool first_moment = false;
    bool second_moment = false;
    for (const Segment& s : request.segments) {
        if (s.hyper == kAveraged && request.averages != nullptr) continue;
        updates = true;
        if (s.hyper >= folded.size()) {
            throw ConfigError("A segment names hyper-parameters " + std::to_string(s.hyper) +
                                  " of " + std::to_string(folded.size()) + ".",
                              "Give an index into the list of hyper-parameters, from 0.");
        }
        first_moment |= uses_first_moment(folded[s.hyper].rule);
        second_moment |= uses_second_moment(folded[s.hyper].rule);
    }
    if (request.moments == MomentFormat::kInt8 && (first_moment || second_moment)) {
        check_blocks(request.segments);
    }
    const std::vector<Array> arrays = arrays_of(request, updates, first_moment, second_moment);
    check_arrays(arrays, request.elements);
    Chunks chunks = cut(request.segments, chunk);
    return std::make_shared<UpdateJob>(kernels, request, std::move(chunks), std::move(folded),
                                       touched(arrays, request.segments));
}

std::shared_ptr<GradientJob> make_gradient_job(const KernelTable& kernels, GradientRequest request,
                                               size_t chunk) {
    check_chunk(chunk);
    check_segments(request.segments, request.elements);
    const GradientArrays& a = request.arrays;
    std::vector<Array> arrays{{"grad", a.grad, dtype_bytes(request.grad_dtype), false}};
    if (a.read_acc || a.write_acc) arrays.push_back({"accumulated", a.acc, 4, a.write_acc});
    if (a.copy != nullptr) {
        arrays.push_back({"copy", a.copy, dtype_bytes(request.grad_dtype), true});
    }
    check_arrays(arrays, request.elements);
    Chunks chunks = cut(request.segments, chunk);
    return std::make_shared<GradientJob>(kernels, request, std::move(chunks),
                                         touched(arrays, request.segments));
}

std::shared_ptr<StreamJob> make_stream_job(const KernelTable& kernels, StreamRequest request,
                                           size_t chunk) {
    check_chunk(chunk);
    if (request.arrays.empty() || request.arrays.size() > kMaxStreamArrays ||
        request.granule == 0) {
        throw ConfigError("A stream over " + std::to_string(request.arrays.size()) + " arrays, " +
                              std::to_string(request.granule) + " elements in turn, was asked for.",
                          "Give 1 to " + std::to_string(kMaxStreamArrays) +
                              " arrays and a granule of at least one element.");
    }
    std::vector<Array> arrays;
    for (const StreamArray& a : request.arrays) {
        arrays.push_back({"stream", a.data, a.bytes_per_element, a.access != Access::kRead});
    }
    check_arrays(arrays, request.elements);
    std::vector<ByteRange> touches = touched(arrays, {{0, request.elements, 0}});
    return std::make_shared<StreamJob>(kernels, std::move(request), chunk, std::move(touches));
}

}  // namespace infinity::cpu_adam
