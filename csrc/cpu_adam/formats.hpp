// The formats of arrays in memory, and the plain structs that the host side passes to the kernels.
//
// This header is included by files compiled for instruction sets that the running CPU may lack, so
// it holds plain data only. An inline function here could be emitted with AVX-512 code, and the
// linker could then pick that copy for everybody.
#pragma once

#if defined(__CUDACC_RTC__)  // NVRTC has no standard library
namespace infinity::cpu_adam {
using size_t = decltype(sizeof(0));
using uintptr_t = unsigned long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
}  // namespace infinity::cpu_adam
#else
#include <cstddef>
#include <cstdint>
#endif

namespace infinity::cpu_adam {

enum class Dtype : uint8_t { kF32, kBf16, kF16 };
constexpr int kDtypes = 3;

// How the fp32 master parameter is kept, and which copy of it an update writes.
enum class ParameterFormat : uint8_t {
    kPlain,      // fp32 master, no copy
    kPlainF32,   // fp32 master, fp32 copy out
    kPlainBf16,  // fp32 master, bf16 copy out (rounded half up)
    kPlainF16,   // fp32 master, fp16 copy out (rounded to nearest, ties to even)
    kSplit,      // the bf16 parameter is the master's rounded high half, an int16 its remainder
};
constexpr int kParameterFormats = 5;

// How moments are kept. See moments.inl for the codes.
enum class MomentFormat : uint8_t {
    kF32,
    kBf16,  // rounded stochastically
    kInt8,  // one byte each, companded, rounded stochastically; an exponent per block of kCodeBlock
};
constexpr int kMomentFormats = 3;

// The update rules, one for each arithmetic. SGD without momentum keeps no state, and Adam with a
// beta of at most one half takes other formulas, so these are rules of their own.
enum class Rule : uint8_t {
    kAdamW,
    kAdamWSmallBeta,
    kAdam,
    kAdamSmallBeta,
    kSgd,
    kSgdMomentum,
    kAdagrad,
    kLion,
};
constexpr int kRules = 8;

// Elements per block, counted from a parameter's first element. Norms are summed per block. Work is
// cut at block boundaries only, so no block of kCodeBlock elements is shared by two threads.
constexpr size_t kBlock = 4096;

// Elements that share an exponent in kInt8, counted from a parameter's first element. 64 fp32
// elements take 256 bytes, the alignment of parameters. A block's exponent has the slot of its
// first element divided by 64, so no two blocks of an array have the same slot.
constexpr size_t kCodeBlock = 64;
static_assert(kBlock % kCodeBlock == 0);

// The spans of kInt8's codes, see the note on them in moments.inl. A span is the number of binades
// between the unit and the exponent of a block. First moments are means and have a sign. Second
// moments are sums of squares, have no sign, and are never rounded to 0.
constexpr uint32_t kFirstSpan = 15;
constexpr uint32_t kSecondSpan = 31;
constexpr int kCodeBit = 20;          // the first bit of a code in an fp32
constexpr uint32_t kNotFinite = 255;  // the exponent of a block that is NaN
// Added to the bits of a block's largest magnitude before its exponent is taken. A magnitude that
// would round up to the next binade belongs to that binade already. What is rounded is x / s + 1,
// hence the 512.
constexpr uint32_t kRoundsUp = (1U << kCodeBit) + 512U;

// [Note: fixed lanes] Element i of a block is squared into fp64 lane i % kLanes, and the lanes are
// added in one fixed tree. Every ISA does exactly these additions, whatever its register width
// (the square of an fp32 is exact in fp64, so fused or not makes no difference), hence equal bits.
constexpr size_t kLanes = 32;

// A set of hyper-parameters folded to the kernels' fp32 constants. See fold() for the formulas.
struct Folded {
    Rule rule;
    bool first_step;      // SGD: the momentum buffer has no content yet
    bool nesterov;        // SGD
    bool decay_from_one;  // second moment: v - w v (small w) or beta v (large w)
    bool lerp_from_grad;  // first moment: m + w d (small w) or g + (w-1) d (large w)
    float scale;          // gradient scale: unscaling times clipping, negative to maximize
    float weight_decay;   // L2 rules: coefficient; AdamW, Lion: lr * weight_decay
    float step_size;      // Adam: lr / bias correction 1; SGD, Lion: lr; Adagrad: decayed lr
    float lerp;           // Adam: w or w - 1; SGD: 1 - dampening; Lion: 1 - beta1
    float momentum;       // SGD; Lion: beta1
    float grad_weight;    // Adam, Lion: 1 - beta2
    float keep_weight;    // Adam: -(1 - beta2) or beta2; Lion: beta2
    float root_scale;     // Adam: 1 / sqrt(bias correction 2)
    float eps;
};

// The arrays of an update, all indexed by the same element number. Unused arrays are null.
struct UpdateArrays {
    const void* grad = nullptr;     // Dtype elements
    const float* acc = nullptr;     // added to the gradient
    void* param = nullptr;          // fp32 master, or the uint16 high half of a split one
    int16_t* remainder = nullptr;   // low half of a split master
    void* copy = nullptr;           // copy out, written only
    void* first_moment = nullptr;   // Adam, Lion: mean of gradients; SGD: momentum buffer
    void* second_moment = nullptr;  // Adam: mean of squares; Adagrad: sum of squares
    // kInt8: biased exponents. The block that starts at element i has its exponent in slot i /
    // kCodeBlock.
    uint8_t* first_scale = nullptr;
    uint8_t* second_scale = nullptr;
};

// How a step changes the running average of the masters. See average.inl.
struct AverageStep {
    bool begins;   // the average has no content yet, and becomes the master
    float weight;  // of the master: 1 - decay
};

// The elements that one call updates, and the source of the random bits that round their moments.
struct Range {
    size_t begin;    // index into the arrays
    size_t count;    // elements
    uint32_t index;  // index of the first element in its parameter, modulo 2^32
    uint32_t seed;   // depends on the parameter and the step
};

// The arrays of a gradient pass: x = grad (+ acc), optionally stored to acc, optionally squared.
struct GradientArrays {
    const void* grad = nullptr;
    float* acc = nullptr;
    void* copy = nullptr;  // gets the bytes of grad, if it is not null
    bool read_acc = false;
    bool write_acc = false;
    bool squares = false;
    float scale = 1.0F;  // the values that are squared are x * scale
};

// How one array of a bandwidth measurement is used.
enum class Access : uint8_t { kRead, kWrite, kReadWrite };
struct StreamArray {
    unsigned char* data;
    uint32_t bytes_per_element;
    Access access;
};
constexpr int kMaxStreamArrays = 8;

// Reads `arrays` and writes `outputs`: the same arrays, or others, to which all but the gradient
// and what is added to it belong. Returns true if a scaled gradient was not finite.
using UpdateKernel = bool (*)(const UpdateArrays& arrays, const UpdateArrays& outputs,
                              const Folded&, const Range&);
// Averages the masters of the range, which an update kernel has written to `outputs` before.
using AverageKernel = void (*)(const UpdateArrays& outputs, float* averages, const AverageStep&,
                               const Range&);
// If squares are requested, writes into `sums` one sum for each started block of kBlock elements.
using GradientKernel = void (*)(const GradientArrays&, size_t begin, size_t count, double* sums);
// Returns a digest of the bytes that were read, so that the compiler can leave no read out.
using StreamKernel = uint64_t (*)(const StreamArray*, int arrays, size_t granule, size_t begin,
                                  size_t count);

struct KernelTable {
    const char* name;
    UpdateKernel update[kRules][kDtypes][kParameterFormats][kMomentFormats];
    AverageKernel average[kParameterFormats];
    GradientKernel gradient[kDtypes];
    StreamKernel stream;
};

}  // namespace infinity::cpu_adam
