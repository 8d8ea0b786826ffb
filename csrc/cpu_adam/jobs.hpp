// Requests on flat arrays and segments, which are checked and cut into the chunks of a Job.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "formats.hpp"
#include "hyper.hpp"
#include "thread_pool.hpp"

namespace infinity::cpu_adam {

// The default number of elements in a chunk. One pass over a chunk takes some 100 us, far more than
// handing the chunk out, and far less than a whole page.
constexpr size_t kDefaultChunk = 16 * kBlock;

// In place of the index of hyper-parameters: the segment is averaged and not updated.
constexpr size_t kAveraged = SIZE_MAX;

// A contiguous part of the arrays that belongs to one parameter. Blocks are counted from `start`,
// so a parameter that is split over segments must be split at multiples of kBlock of its elements.
// Only updates use the members after `count`.
struct Segment {
    size_t start;
    size_t count;
    size_t hyper = 0;   // index of the parameter's hyper-parameters, or kAveraged
    size_t index = 0;   // index of the first element in its parameter
    uint32_t seed = 0;  // of the parameter and step, for moments that are rounded stochastically
};

struct UpdateRequest {
    size_t elements;  // the length of every array
    Dtype grad_dtype;
    ParameterFormat format;
    MomentFormat moments;
    UpdateArrays arrays;
    std::vector<Segment> segments;
    std::vector<Hyper> hypers;
    double scale;
    float* averages = nullptr;  // running averages of the masters; null if there are none
    AverageStep average{};
    // Other memory for the results, in place of the arrays that the update changes; none: these
    // arrays themselves. Elements outside the segments are not written.
    std::optional<UpdateArrays> outputs{};
};

// What is equal in all updates of the same arrays, wherever these lie.
struct UpdateForm {
    // An array in one of some ranges of memory: the number of the range, and bytes from its start.
    struct Place {
        size_t memory;
        size_t offset;
    };
    // A contiguous part of a parameter: see Segment.
    struct Part {
        size_t start;
        size_t count;
        size_t index;
        size_t parameter;
    };
    static constexpr size_t kArrays = 10;

    size_t elements;
    Dtype grad_dtype;
    ParameterFormat format;
    MomentFormat moments;
    // In the order of UpdateArrays, and the averages at last; nullopt: the array is missing.
    std::array<std::optional<Place>, kArrays> places;
    std::vector<Part> parts;
};

// How one parameter is updated in a step.
struct ParameterStep {
    size_t hyper;  // or kAveraged
    uint32_t seed;
};

// What is equal for all arrays that are updated in a step.
struct UpdateStep {
    // By the number of a parameter; nullopt, and for larger numbers: it is not updated.
    std::vector<std::optional<ParameterStep>> parameters;
    std::vector<Hyper> hypers;
    double scale;
    AverageStep average;
};

// The update of the arrays of `form`. memory: the address of each range. outputs: addresses of
// ranges for the results; null: the arrays themselves.
UpdateRequest request_of(const UpdateForm& form, const UpdateStep& step,
                         const std::vector<uintptr_t>& memory,
                         const std::vector<uintptr_t>* outputs);

struct GradientRequest {
    size_t elements;
    Dtype grad_dtype;
    GradientArrays arrays;
    std::vector<Segment> segments;
};

struct StreamRequest {
    size_t elements;
    std::vector<StreamArray> arrays;
    size_t granule;  // elements that are taken from one array before the next
};

// Elements [begin, begin + count) of one segment. `begin` is a multiple of kBlock.
struct Piece {
    size_t segment;
    size_t begin;
    size_t count;
};

// Pieces, grouped into chunks of about the requested size. Small segments share a chunk. Chunk c
// holds the pieces [first[c], first[c + 1]).
struct Chunks {
    std::vector<Piece> pieces;
    std::vector<size_t> first{0};
};

class UpdateJob : public Job {
  public:
    UpdateJob(const KernelTable& kernels, const UpdateRequest& request, Chunks chunks,
              std::vector<Folded> folded, std::vector<ByteRange> touches);
    void run(size_t chunk) noexcept override;
    // The number of elements that are updated or averaged.
    size_t updated() const;
    // Indices of the segments in which a scaled gradient was not finite. Valid once the job is
    // done.
    std::vector<size_t> nonfinite() const;

  private:
    const KernelTable& kernels_;
    const UpdateRequest request_;
    const Chunks plan_;
    const std::vector<Folded> folded_;
    std::vector<std::atomic<bool>> nonfinite_;
};

class GradientJob : public Job {
  public:
    GradientJob(const KernelTable& kernels, const GradientRequest& request, Chunks chunks,
                std::vector<ByteRange> touches);
    void run(size_t chunk) noexcept override;
    // The sums of squares of one segment's blocks, in order. Valid once the job is done.
    std::vector<double> block_sums(size_t segment) const;
    size_t segments() const { return request_.segments.size(); }

  private:
    const KernelTable& kernels_;
    const GradientRequest request_;
    const Chunks plan_;
    std::vector<size_t> first_block_;  // of each segment: index of its first block in sums_
    std::vector<double> sums_;
};

class StreamJob : public Job {
  public:
    StreamJob(const KernelTable& kernels, StreamRequest request, size_t chunk,
              std::vector<ByteRange> touches);
    void run(size_t chunk) noexcept override;

  private:
    const KernelTable& kernels_;
    const StreamRequest request_;
    const size_t chunk_;
    std::atomic<uint64_t> digest_{0};
};

// Each function checks its request before anything is touched, and throws ConfigError. Errors are
// null or misaligned arrays, segments outside the arrays, overlapping segments or arrays, and
// formats that do not go together. `chunk` is in elements, a positive multiple of kBlock.
std::shared_ptr<UpdateJob> make_update_job(const KernelTable& kernels, UpdateRequest request,
                                           size_t chunk);
std::shared_ptr<GradientJob> make_gradient_job(const KernelTable& kernels, GradientRequest request,
                                               size_t chunk);
std::shared_ptr<StreamJob> make_stream_job(const KernelTable& kernels, StreamRequest request,
                                           size_t chunk);

}  // namespace infinity::cpu_adam
