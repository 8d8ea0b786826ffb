// The work of one warp of a launch. Needs vec_warp.hpp and kernels.inl.

#include "device.hpp"

namespace infinity::cpu_adam {
namespace {

// Runs the update that the piece's formats and the rule select.
void run_update(const DevicePiece& piece, const UpdateArrays& arrays, const Folded& folded,
                const Range& range);

// The index in [first, end) of the last entry of `before` that is at most `at`: the piece that `at`
// is in.
inline uint32_t find(const uint32_t* before, uint32_t first, uint32_t end, uint32_t at) {
    while (end - first > 1) {
        const uint32_t middle = first + (end - first) / 2;
        if (before[middle] <= at) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return first;
}

// The elements of tile number `tile` of a piece.
inline Range range_of(const DevicePiece& piece, uint32_t tile, uint32_t seed) {
    const uint32_t done = tile * kTile;
    const uint32_t left = piece.count - done;
    return {size_t{piece.start} + done, left < kTile ? left : kTile, piece.index + done, seed};
}

inline void update_tile(const UpdateLaunch& launch, uint32_t warp) {
    const uint32_t tile = launch.tiles_before[launch.first_piece] + warp;
    if (tile >= launch.tiles_before[launch.end_piece]) return;
    const uint32_t at = find(launch.tiles_before, launch.first_piece, launch.end_piece, tile);
    const DevicePiece& piece = launch.pieces[at];
    const uint32_t parameter = piece.parameter - launch.first_parameter;
    const uint8_t hyper = launch.hyper[parameter];
    if (hyper == kNoUpdate || (launch.stop != nullptr && *launch.stop != 0)) return;
    UpdateArrays arrays = piece.arrays;
    if (const void* whole = launch.gradients[parameter]) {
        // The element `start` of the array that the update reads is the element `index` of `whole`.
        const int64_t shift = (int64_t{piece.index_high} << 32) + piece.index - piece.start;
        const int64_t size = piece.gradient == Dtype::kF32 ? 4 : 2;
        arrays.grad = static_cast<const char*>(whole) + shift * size;
    }
    run_update(piece, arrays, launch.hypers[hyper],
               range_of(piece, tile - launch.tiles_before[at], launch.seeds[parameter]));
}

inline void update_tile_of_pieces(const PiecesLaunch& launch, uint32_t warp) {
    if (warp >= launch.tiles_before[launch.count]) return;
    const uint32_t at = find(launch.tiles_before, 0, launch.count, warp);
    const DevicePiece& piece = launch.pieces[at];
    run_update(piece, piece.arrays, launch.hypers[launch.hyper[at]],
               range_of(piece, warp - launch.tiles_before[at], launch.seeds[at]));
}

// Sums the squares of at most a block of the `left` elements of a gradient from `begin` on.
inline void square(Dtype dtype, const void* gradient, size_t begin, size_t left, double& into) {
    const size_t count = left < kBlock ? left : kBlock;
    GradientArrays arrays;
    arrays.grad = gradient;
    double sum = 0;
    switch (dtype) {
        case Dtype::kF32:
            sum = square_block<Dtype::kF32>(arrays, begin, count);
            break;
        case Dtype::kBf16:
            sum = square_block<Dtype::kBf16>(arrays, begin, count);
            break;
        case Dtype::kF16:
            sum = square_block<Dtype::kF16>(arrays, begin, count);
            break;
    }
    if (Vec::lane(0) == 0) into = sum;
}

inline void square_blocks(const SquaresLaunch& launch, uint32_t warp) {
    if (warp >= launch.blocks_before[launch.pieces_count]) return;
    const uint32_t at = find(launch.blocks_before, 0, launch.pieces_count, warp);
    const DevicePiece& piece = launch.pieces[at];
    const size_t done = (warp - launch.blocks_before[at]) * kBlock;
    square(piece.gradient, piece.arrays.grad, piece.start + done, piece.count - done,
           launch.sums[warp]);
}

inline void square_fresh(const FreshSquaresLaunch& launch, uint32_t warp) {
    const size_t done = size_t{warp} * kBlock;
    if (done >= launch.count) return;
    double& sum = launch.sums[warp];
    square(launch.dtype, launch.gradient, done, launch.count - done, sum);
    // The square of a finite element is far below the largest float64.
    constexpr double kLargest = 0x1.fffffffffffffp+1023;
    if (launch.stop == nullptr || Vec::lane(0) != 0 || sum <= kLargest) return;
    if (*launch.stop == 0) *launch.stop = launch.number;  // all warps write the same number
}

}  // namespace
}  // namespace infinity::cpu_adam
