// The kernels as NVRTC compiles them for a device. INFINITY_UPDATES names the updates that may be
// requested, each as INFINITY_UPDATE(Rule, Dtype, ParameterFormat, MomentFormat). Compiling all
// possible updates would take minutes.
#include "vec_warp.hpp"
// Needs the Vec included above.
#include "kernels.inl"
#include "updates.inl"
// Needs kernels.inl and updates.inl.
#include "device.inl"

namespace infinity::cpu_adam {
namespace {

constexpr int code_of(Rule rule, Dtype gradient, ParameterFormat format, MomentFormat moments) {
    return static_cast<int>(rule) << 24 | static_cast<int>(gradient) << 16 |
           static_cast<int>(format) << 8 | static_cast<int>(moments);
}

void run_update(const DevicePiece& piece, const UpdateArrays& arrays, const Folded& folded,
                const Range& range) {
    switch (code_of(folded.rule, piece.gradient, piece.format, piece.moments)) {
#define INFINITY_UPDATE(K, D, P, M)                                                            \
    case code_of(Rule::K, Dtype::D, ParameterFormat::P, MomentFormat::M):                      \
        UpdateOf<Rule::K, Dtype::D, ParameterFormat::P, MomentFormat::M>::run(arrays, folded, \
                                                                              range);          \
        break;
        INFINITY_UPDATES
#undef INFINITY_UPDATE
        default:
            __trap();  // an update that nobody named
    }
}

inline uint32_t warp_of_launch() {
    return blockIdx.x * (blockDim.x / Vec::kWidth) + threadIdx.x / Vec::kWidth;
}

}  // namespace
}  // namespace infinity::cpu_adam

using namespace infinity::cpu_adam;

// Four blocks a multiprocessor: the additional loads under way gain more than a few spilled bytes
// cost.
extern "C" __global__ __launch_bounds__(256, 4) void infinity_update(
    const __grid_constant__ UpdateLaunch launch) {
    update_tile(launch, warp_of_launch());
}

extern "C" __global__ __launch_bounds__(256, 4) void infinity_update_pieces(
    const __grid_constant__ PiecesLaunch launch) {
    update_tile_of_pieces(launch, warp_of_launch());
}

extern "C" __global__ void infinity_squares(const __grid_constant__ SquaresLaunch launch) {
    square_blocks(launch, warp_of_launch());
}

extern "C" __global__ void infinity_fresh_squares(
    const __grid_constant__ FreshSquaresLaunch launch) {
    square_fresh(launch, warp_of_launch());
}
